"""The results file, from which the site is built: one letter for each requirement.

Each implementation has one entry for each kind of device; a newer report replaces it. The letters
of an area are in the order of the ids at the top of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _outcomes, _report, _untrusted_file
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.subject._adapters import SHIPPED

MAX_BYTES = 1 << 20
LETTERS: Mapping[str, str] = {
    "pass": "P",
    "fail": "F",
    "error": "E",
    "xfail": "X",
    "xpass": "U",
    "not_claimed": ".",
    "not_provided": "-",
    "no_device": "O",
    "not_run": "?",
}
_NO_ROW = " "  # the requirement is not for this device, or newer than the run
_OUTCOMES = {letter: outcome for outcome, letter in LETTERS.items()}
_Registry = Mapping[str, Requirement]


@dataclass(frozen=True)
class Result:
    """What one implementation came to on one kind of device; `card` names an accelerator."""

    adapter: str
    name: str
    version: str
    suite: str
    torch: str
    device: str
    card: str | None
    date: str
    outcomes: Mapping[str, str]


def results_of(report: Mapping[str, Any]) -> list[Result]:
    """Return the result of a report for each of its devices."""
    who, environment = report["implementation"], report["environment"]
    return [
        Result(
            adapter=who["adapter"],
            name=who["name"],
            version=who["version"],
            suite=report["suite"]["version"],
            torch=environment["torch"],
            device=device,
            card=None if device == "cpu" else environment["gpu"],
            date=report["date"],
            outcomes=_worst(row for row in report["rows"] if row["device"] == device),
        )
        for device in report["claims"]["devices"]
    ]


def _worst(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["id"], []).append(row["outcome"])
    return {id: _outcomes.worst(outcomes) for id, outcomes in found.items()}


def merged(known: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """Return both, newer ones in place of those of the same adapter and device."""
    found = {(r.adapter, r.device): r for r in (*known, *new)}
    return sorted(found.values(), key=_place)


def _place(result: Result) -> tuple[int, str, bool, str]:
    """Order as the shipped adapters are, then by name; the CPU comes first."""
    shipped = list(SHIPPED)
    place = shipped.index(result.adapter) if result.adapter in shipped else len(shipped)
    return place, result.adapter, result.device != "cpu", result.device


def to_text(results: Iterable[Result], registry: _Registry) -> str:
    """Write results as they are stored."""
    ids = {area: [r.id for r in registry.values() if r.area == area] for area in AREAS}
    head = ",\n".join(f"  {json.dumps(a)}: {json.dumps(' '.join(of))}" for a, of in ids.items())
    entries = []
    for result in results:
        facts = asdict(result)
        outcomes = facts.pop("outcomes")
        words = [f"{json.dumps(word)}: {json.dumps(value)}" for word, value in facts.items()]
        letters = [f'"{area}": "{_written(of, outcomes)}"' for area, of in ids.items()]
        entries.append(
            f'  {{{", ".join(words)},\n   "outcomes": {{\n    ' + ",\n    ".join(letters) + "}}"
        )
    listed = ",\n".join(entries)
    return f'{{\n "requirements": {{\n{head}\n }},\n "implementations": [\n{listed}\n ]\n}}\n'


def _written(ids: Sequence[str], outcomes: Mapping[str, str]) -> str:
    return "".join(LETTERS[outcomes[id]] if id in outcomes else _NO_ROW for id in ids)


def read(path: Path) -> list[Result]:
    """Read results; a file that does not exist has none.

    Raises:
        ReportError: the file holds something else.
    """
    if not path.exists():
        return []
    text = _untrusted_file.read_text(path, role="results", max_bytes=MAX_BYTES)
    try:
        data = json.loads(text)
        ids = {area: words.split() for area, words in data["requirements"].items()}
        return [_result(entry, ids) for entry in data["implementations"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(
            f"results {path.name!r:.80} cannot be used: {error!s:.120}. It must be a file that "
            "`torchparts-conformance publish` wrote."
        ) from error


def _result(entry: Mapping[str, Any], ids: Mapping[str, Sequence[str]]) -> Result:
    outcomes = {
        id: _OUTCOMES[letter]
        for area, letters in entry["outcomes"].items()
        for id, letter in zip(ids[area], letters, strict=True)
        if letter != _NO_ROW
    }
    return Result(**{**entry, "outcomes": outcomes})


def as_report(result: Result, registry: _Registry) -> dict[str, Any]:
    """Return a result as what renderings read of a report, without cases and reasons."""
    rows = [
        {
            "id": r.id,
            "case": "",
            "device": result.device,
            "area": r.area,
            "level": r.level,
            "profile": r.profile,
            "group": r.group,
            "outcome": result.outcomes.get(r.id, "not_run"),
            "reason": "",
        }
        for r in registry.values()
        if r.is_for(result.device)
    ]
    report = {
        "suite": {"version": result.suite},
        "implementation": {"name": result.name, "version": result.version},
        "environment": {"torch": result.torch, "gpu": result.card},
        "claims": {"devices": [result.device], "areas": list(AREAS)},
        "date": result.date,
        "rows": rows,
        "problems": [],
    }
    return report | _report.derived(report)
