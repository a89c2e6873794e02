"""The results file of the site: one letter for each requirement.

Each implementation has one entry for each kind of device; a newer report replaces it. The letters
of an area are in the order of the ids at the top of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance._adapters import SHIPPED
from torchparts_conformance._errors import ReportError
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._requirement import Requirement

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
_NO_ROW = " "  # not for this device, or newer than the run
_OUTCOMES = {letter: outcome for outcome, letter in LETTERS.items()}


@dataclass(frozen=True)
class Result:
    """Results of one implementation on one kind of device; `card` is the accelerator's name."""

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
            suite=report["suite"],
            torch=environment["torch"],
            device=device,
            card=None if device == "cpu" else environment["card"],
            date=report["date"],
            outcomes=_report.outcomes_by_id(r for r in report["rows"] if r["device"] == device),
        )
        for device in report["claims"]["devices"]
    ]


def merged(known: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """Merge results; new ones replace those of the same adapter and device."""
    found = {(r.adapter, r.device): r for r in (*known, *new)}
    return sorted(found.values(), key=_place)


def _place(result: Result) -> tuple[int, str, bool, str]:
    """Sort key: shipped adapters in their order, then by name; the CPU comes first."""
    shipped = list(SHIPPED)
    place = shipped.index(result.adapter) if result.adapter in shipped else len(shipped)
    return place, result.adapter, result.device != "cpu", result.device


def to_text(results: Iterable[Result], registry: Mapping[str, Requirement]) -> str:
    """Format results for storage; requirements that no longer exist are left out."""
    ids = {area: [r.id for r in registry.values() if r.area == area] for area in AREAS}
    head = ",\n".join(f"  {json.dumps(a)}: {json.dumps(' '.join(of))}" for a, of in ids.items())
    entries = []
    for result in results:
        facts = asdict(result)
        outcomes = facts.pop("outcomes")
        words = [f"{json.dumps(word)}: {json.dumps(value)}" for word, value in facts.items()]
        letters = [
            f'"{area}": "{"".join(LETTERS.get(outcomes.get(id), _NO_ROW) for id in of)}"'
            for area, of in ids.items()
        ]
        entries.append(
            f'  {{{", ".join(words)},\n   "outcomes": {{\n    ' + ",\n    ".join(letters) + "}}"
        )
    listed = ",\n".join(entries)
    return f'{{\n "requirements": {{\n{head}\n }},\n "implementations": [\n{listed}\n ]\n}}\n'


def read(path: Path) -> list[Result]:
    """Read results; a missing file has none."""
    if not path.exists():
        return []
    text = _report.read_text(path, role="results", max_bytes=MAX_BYTES)
    try:
        data = json.loads(text)
        ids = {area: words.split() for area, words in data["requirements"].items()}
        return [_result(entry, ids) for entry in data["implementations"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(
            f"results {path.name!r:.80} cannot be used: {error!s:.120}. `torchparts-conformance "
            "publish` writes the file."
        ) from error


def _result(entry: Mapping[str, Any], ids: Mapping[str, list[str]]) -> Result:
    outcomes = {
        id: _OUTCOMES[letter]
        for area, letters in entry["outcomes"].items()
        for id, letter in zip(ids[area], letters, strict=True)
        if letter != _NO_ROW
    }
    return Result(**{**entry, "outcomes": outcomes})


def verdicts_of(result: Result, registry: Mapping[str, Requirement]) -> dict[str, Any]:
    """Return the verdicts of a result; requirements that are newer than it do not count."""
    rows = [
        {"id": id, "case": "", "device": result.device, "outcome": outcome}
        for id, outcome in result.outcomes.items()
        if id in registry
    ]
    asked = {"devices": [result.device], "areas": list(AREAS)}
    return _report.derived({"rows": rows, "problems": [], "claims": asked}, registry)
