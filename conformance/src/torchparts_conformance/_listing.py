"""The public list of implementations: one TOML file per implementation, made from a report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchparts_conformance import _badge, _report, _verify
from torchparts_conformance._errors import ReportError
from torchparts_conformance._process import run_cases
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._cases import parse_toml

_MAX_BYTES = 1 << 16
_URL = r"https://[a-z0-9.-]+\.[a-z]{2,}(/[\w./%#?=&~+@-]*)?"
_WORD = r"[\w.-]{1,40}"
# Key -> pattern of its text, or of each text of its list.
_TEXTS = {
    "name": r"[^\x00-\x1f]{1,100}",
    "version": r"[^\x00-\x1f]{1,100}",
    "adapter": r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?|[a-z][a-z0-9-]*",
    "contact": rf"{_URL}|[\w.+-]+@[a-z0-9.-]+\.[a-z]{{2,}}",
    "source": _URL,
    "date": r"\d{4}-\d\d-\d\d",
    "suite": _WORD,
    "torch": r"[\w.+-]{1,40}",
}
_LISTS = {
    "install": r"[A-Za-z0-9][\w.-]*==[\w.+!-]+",
    "devices": r"[a-z][a-z0-9]*",
    "areas": "|".join(AREAS),
    "profiles": _WORD,
}
Entry = dict[str, Any]


def new(report: Mapping[str, Any], *, contact: str, source: str) -> Entry:
    """Make an entry from a report."""
    who, claims = report["implementation"], report["claims"]
    reasons = [*_verify.problems(report), *report["problems"]]
    if any(row["outcome"] == "not_run" for row in report["rows"]):
        reasons.append("cases were left out; run whole areas")
    if not who["distributions"]:
        reasons.append("the adapter names no distribution to install")
    if reasons:
        raise ReportError(f"the report cannot be listed: {'; '.join(reasons[:3])}.")
    entry = {
        "name": who["name"],
        "version": who["version"],
        "adapter": who["adapter"],
        "contact": contact,
        "source": source,
        "date": report["date"],
        "suite": report["suite"],
        "torch": report["environment"]["torch"],
        "install": [f"{name}=={version}" for name, version in who["distributions"].items()],
        "devices": claims["devices"],
        "areas": claims["areas"],
        "profiles": claims["profiles"] or [],
        "results": _results(report),
    }
    return _checked(entry)


def _results(report: Mapping[str, Any]) -> dict[str, str]:
    return {badge.area: badge.message for badge in _badge.badges(report)}


def file_of(entry: Entry) -> str:
    """Return the file name of an entry, from name and version of the implementation."""
    texts = (entry["name"], entry["version"])
    words = [re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") for text in texts]
    if not all(words):
        raise ReportError(f"{' '.join(texts)!r:.80} has no letters or digits to name a file by.")
    return f"{'-'.join(words)}.toml"


def read(path: Path) -> Entry:
    """Read an entry."""
    text = _report.read_text(path, role="entry", max_bytes=_MAX_BYTES)
    try:
        entry = _checked(parse_toml(text))
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"entry {path.name!r:.80}: {error!s:.200}. Write it with `torchparts-conformance "
            "submit`."
        ) from error
    if file_of(entry) != path.name:
        raise ReportError(f"entry {path.name!r:.80} must be named {file_of(entry)}.")
    return entry


def _checked(entry: Entry) -> Entry:
    if wrong := sorted({*_TEXTS, *_LISTS, "results"} ^ entry.keys()):
        raise ReportError(f"{', '.join(wrong):.120} is missing or unknown")
    for word, form in (*_TEXTS.items(), *_LISTS.items()):
        texts = entry[word] if word in _LISTS and isinstance(entry[word], list) else [entry[word]]
        if not all(isinstance(text, str) and re.fullmatch(form, text, re.A) for text in texts):
            raise ReportError(f"{word} is {entry[word]!r:.80}, which has the wrong form")
    results = entry["results"]
    if not isinstance(results, dict) or not all(isinstance(v, str) for v in results.values()):
        raise ReportError(f"results is {results!r:.80}, which has the wrong form")
    return entry


def to_toml(entry: Entry) -> str:
    """Write an entry in the format of `read`."""
    lines = [f"{word} = {json.dumps(v)}" for word, v in entry.items() if word != "results"]
    lines += ["", "[results]"]
    lines += [f"{json.dumps(area)} = {json.dumps(text)}" for area, text in entry["results"].items()]
    return "\n".join(lines) + "\n"


def submit(entry: Entry, folder: Path) -> Path:
    """Write the entry of a report to a folder."""
    path = folder / file_of(entry)
    if path.exists():
        raise ReportError(
            f"{path.name} exists, and results are not replaced. Submit a new version."
        )
    _report.write(path, to_toml(entry))
    return path


def recheck(path: Path, *, install: bool, jobs: int) -> list[str]:
    """Run an entry again and return the differences between the results.

    Args:
        path: of the entry.
        install: whether to install its distributions into this environment first.
        jobs: processes at a time.
    """
    entry = read(path)
    if install:
        command = [sys.executable, "-m", "pip", "install", "--quiet", *entry["install"]]
        if subprocess.run(command, check=False).returncode:
            raise ReportError(f"{' '.join(entry['install'])} cannot be installed. See pip above.")
    report = {"claims": {**entry, "profiles": entry["profiles"] or None}}
    found = _results(run_cases(_verify.options(report, entry["adapter"]), jobs=jobs))
    return [
        f"{area}: {entry['results'].get(area, 'absent')} -> {found.get(area, 'absent')}"
        for area in sorted({*entry["results"], *found})
        if entry["results"].get(area) != found.get(area)
    ]
