"""What a scenario came to, and the table, JSON and page made of it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch


@dataclass
class Loss:
    """One trial that was lost.

    Attributes:
        number: of the trial.
        why: in a line.
        command: repeats it.
    """

    number: int
    why: str
    command: str


@dataclass
class Result:
    """A scenario's trials.

    Attributes:
        kind: of the scenario.
        name: of the scenario.
        tried: trials that ended, well or not.
        skipped: trials that came to nothing: ranks were not at the same place.
        total: trials there are; more than were tried where time was up.
        seconds: for all of them, starting processes included.
        lost: those that were lost.
        notes: further figures.
        early: how many of them came first, as no two of them are of one kind; 0 where none did.
    """

    kind: str
    name: str
    tried: int = 0
    skipped: int = 0
    total: int = 0
    seconds: float = 0.0
    lost: list[Loss] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    early: int = 0

    @property
    def survived(self) -> int:
        """Trials that ended well."""
        return self.tried - len(self.lost)


HEAD = ("scenario", "tried", "survived", "lost", "seconds", "")


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The table's cells, with a sum at the end."""
    found = [
        (
            f"{each.kind} {each.name}",
            *(str(count) for count in (each.tried, each.survived, len(each.lost))),
            f"{each.seconds:.0f}",
            _remarks(each),
        )
        for each in results
    ]
    tried, lost = sum(each.tried for each in results), sum(len(each.lost) for each in results)
    seconds = sum(each.seconds for each in results)
    return [*found, ("all", str(tried), str(tried - lost), str(lost), f"{seconds:.0f}", "")]


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


def text(results: list[Result]) -> str:
    """For a terminal: a table, then every loss with its command."""
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
        for loss in result.lost:
            lines += [f"lost: {result.kind} {result.name}: {loss.why}", f"  {loss.command}"]
    return "\n".join(lines)


def page(results: list[Result], command: str) -> str:
    """For the documentation."""
    table = [HEAD, ("---",) * len(HEAD), *rows(results)]
    lost = sum(len(each.lost) for each in results)
    return "\n".join(
        [
            "# Storm, CPU",
            "",
            "- **Question**: what do interrupts, kills, full disks, forks and long runs leave "
            "behind?",
            f"- **Hardware**: {os.cpu_count()} cores, CPU.",
            f"- **Software**: torch {torch.__version__}, Python {platform.python_version()}.",
            f"- **Date and entity**: {datetime.now(timezone.utc):%Y-%m-%d}, torchparts.",
            f"- **Command**: `{command}`, which wrote this page.",
            f"- **Answer**: {lost} lost.",
            "",
            *("| " + " | ".join(row) + " |" for row in table),
            "",
        ]
    )


def write(results: list[Result], command: str, folder: Path) -> None:
    """Leave `storm.json` and `storm.md` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    found = {**about, "scenarios": [asdict(each) for each in results]}
    (folder / "storm.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "storm.md").write_text(page(results, command), encoding="utf-8")


def read(file: Path) -> list[Result]:
    """What `write` left in `storm.json`."""
    found = json.loads(file.read_text(encoding="utf-8"))["scenarios"]
    return [Result(**{**each, "lost": [Loss(**loss) for loss in each["lost"]]}) for each in found]
