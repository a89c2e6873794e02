"""What a terminal says at the end of a run: verdicts, then each failure once, then what to do.

Rule 1: failures are told by requirement, with its sentence; those with one reason together.
Rule 2: what is not claimed or not provided is a line, not a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchparts_conformance.report import _known_failures, _outcomes
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.requirements._traceability import source_of

WRONG = ("error", "fail", "xpass")
TOLD_IN_FULL = 20
_WIDTH = 200
_Rows = Sequence[Mapping[str, Any]]


def summary(
    report: Mapping[str, Any],
    registry: Mapping[str, Requirement],
    page: Path | None = None,
    notes: Iterable[str] = (),
) -> list[str]:
    """Say what a report says.

    Args:
        report: of a run.
        registry: for the sentences of the requirements.
        page: where the matrix was written, if it was.
        notes: what is to be told beside it, and changes no verdict.
    """
    where = [f"page: {page}"] if page else []
    return [
        *_failures(report, registry),
        *_verdicts(report),
        *_left_out(report),
        *_problems(report),
        *notes,
        *where,
        f"digest {report['digest'][:16]}",
        f"{report['implementation']['name']}: {report['verdict']}",
    ]


def _problems(report: Mapping[str, Any]) -> list[str]:
    """Give the problems, without an announced failure that passes: its row was told above."""
    told = tuple(
        _known_failures.passes(row["id"], row["device"])
        for row in report["rows"]
        if row["outcome"] == "xpass"
    )
    return [text for text in report["problems"] if not text.startswith(told)]


def _verdicts(report: Mapping[str, Any]) -> Iterator[str]:
    for v in report["verdicts"]:
        if v["verdict"] not in (_outcomes.NOT_CLAIMED, _outcomes.NOT_PROVIDED):
            name = f"{v['profile']} {v['group']}".strip()
            counts = "  ".join(
                f"{level.upper()} {v[level][0]}/{v[level][1]}"
                for level in ("must", "should")
                if v[level][1] or level == "must"
            )
            line = f"{v['area']:<13} {name:<18} {v['device']:<5} {v['verdict']:<15} {counts}"
            yield f"{line}{_counted(_of(report['rows'], v))}"


def _of(rows: _Rows, verdict: Mapping[str, Any]) -> _Rows:
    key = ("area", "profile", "group", "device")
    return [row for row in rows if all(row[word] == verdict[word] for word in key)]


def _counted(rows: _Rows) -> str:
    """Count the requirements by what kept them from passing."""
    worst = [_outcomes.worst(r["outcome"] for r in rows if r["id"] == id) for id in _ids(rows)]
    words = [f"{worst.count(o)} {o.replace('_', ' ')}" for o in _outcomes.OUTCOMES if o in worst]
    return "" if set(worst) <= {"pass"} else f"  ({', '.join(words)})"


def _left_out(report: Mapping[str, Any]) -> Iterator[str]:
    for word in (_outcomes.NOT_CLAIMED, _outcomes.NOT_PROVIDED):
        names: dict[str, dict[str, None]] = {}
        judged = {v["area"] for v in report["verdicts"] if v["verdict"] != word}
        for v in report["verdicts"]:
            if v["verdict"] == word:
                # A profile is not claimed as a whole; a group is not provided, in whatever profile.
                own = (word == _outcomes.NOT_PROVIDED and v["group"]) or v["profile"]
                name = own if v["area"] in judged else ""
                names.setdefault(v["area"], {})[name] = None
        said = [f"{area} {', '.join(filter(None, found))}".strip() for area, found in names.items()]
        if said:
            yield f"{word}: {'; '.join(said)}"


def _failures(report: Mapping[str, Any], registry: Mapping[str, Requirement]) -> Iterator[str]:
    wrong = [row for row in report["rows"] if row["outcome"] in WRONG]
    together: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in wrong:
        together.setdefault((row["outcome"], row["reason"]), []).append(row)
    told: set[str] = set()
    for number, rows in enumerate(together.values()):
        if number < TOLD_IN_FULL:
            yield from _failure(rows, registry, report["implementation"]["adapter"], told)
            yield ""
        else:
            yield f"{', '.join(_ids(rows))} {rows[0]['outcome']}: {rows[0]['reason']:.{_WIDTH}}"
    not_run = _ids([row for row in report["rows"] if row["outcome"] == "not_run"])
    if not_run:
        yield f"not run: {len(not_run)} requirements, {', '.join(not_run[:5])} ..."


def _failure(
    rows: _Rows, registry: Mapping[str, Requirement], adapter: str, told: set[str]
) -> Iterator[str]:
    """Tell of rows that have one reason; the sentence of a requirement is said once."""
    first, *others = _ids(rows)
    row = rows[0]
    yield f"{first} {row['level']} {row['profile']} {row['group']}".rstrip() + (
        f", {row['device']}: {row['outcome']}"
    )
    if first in registry and first not in told:
        told.add(first)
        yield f"  {registry[first].text}"
    if row["reason"]:
        yield f"  seen   {row['reason']:.{_WIDTH}}"
    if row["where"]:
        yield f"  at     {row['where']}"
    if others:
        yield f"  also   {', '.join(others)}"
    yield f"  next   {_next_step(row, adapter)}"


def _next_step(row: Mapping[str, Any], adapter: str) -> str:
    """Say what to do: mend the adapter where it raised, else look at the requirement alone."""
    last = row["where"].rpartition(" > ")[2]
    if row["outcome"] == "error" and last.startswith("adapter "):
        return f"mend {last.removeprefix('adapter ')}, or say in `lacks` what is not there"
    if row["outcome"] == "xpass":
        return "take it off the announced failures: it passes"
    return f"torchparts-conformance run --impl {adapter} --explain {row['id']}"


def _ids(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["id"] for row in rows))


def explained(requirement: Requirement, cases: Iterable[tuple[str, str]]) -> list[str]:
    """Say everything that is known of a requirement before it is run.

    Args:
        requirement: to tell of.
        cases: name and first line of each of its cases.
    """
    r = requirement
    facts = {
        "profile": f"{r.area} {r.profile} {r.group}".rstrip(),
        "why": r.rationale,
        "source": source.key if (source := source_of(r)) else "",
        "torch": r.torch_deviation,
    }
    lines = [f"  {word:<8} {text}" for word, text in facts.items() if text]
    return [f"{r.id}: {r.text}", *lines, *(f"  case     {name}: {text}" for name, text in cases)]
