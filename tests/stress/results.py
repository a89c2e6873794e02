"""Results of scenarios, and the printed table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Failure:
    """One failed trial.

    Attributes:
        number: of the trial.
        why: the reason, in one line.
        command: repeats it.
    """

    number: int
    why: str
    command: str


@dataclass
class Result:
    """The trials of one scenario.

    Attributes:
        kind: of the scenario.
        name: of the scenario.
        tried: finished trials.
        skipped: trials that do not count, since ranks were at different places.
        total: all trials; more than `tried` if time was up.
        seconds: for all of them, with the start of processes.
        failures: failed trials.
        notes: further figures.
        early: number of trials that ran first, one of each kind; 0 for none.
    """

    kind: str
    name: str
    tried: int = 0
    skipped: int = 0
    total: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    early: int = 0

    @property
    def passed(self) -> int:
        """Return the number of passed trials."""
        return self.tried - len(self.failures)


HEAD = ("scenario", "tried", "passed", "failed", "seconds", "")


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Return the table's cells, with a sum at the end."""
    found = [
        (
            f"{each.kind} {each.name}",
            *(str(count) for count in (each.tried, each.passed, len(each.failures))),
            f"{each.seconds:.0f}",
            _remarks(each),
        )
        for each in results
    ]
    tried = sum(each.tried for each in results)
    failed = sum(len(each.failures) for each in results)
    seconds = sum(each.seconds for each in results)
    return [*found, ("all", str(tried), str(tried - failed), str(failed), f"{seconds:.0f}", "")]


def _remarks(result: Result) -> str:
    said = [f"{name} {value}" for name, value in result.notes.items()]
    if result.tried + result.skipped < result.total:
        said.insert(0, f"of {result.total}")
        if result.early:
            done = min(result.tried + result.skipped, result.early)
            said.insert(1, f"{done} of {result.early} instructions")
    if result.skipped:
        said.append(f"{result.skipped} skipped")
    return ", ".join(said)


def table(results: list[Result]) -> str:
    """Format a table, then every failure with the command that repeats it."""
    cells = [HEAD, *rows(results)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in (0, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    for result in results:
        for failure in result.failures:
            lines += [f"failed: {result.kind} {result.name}: {failure.why}", f"  {failure.command}"]
    return "\n".join(lines)
