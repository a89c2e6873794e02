"""The page with the counts of each distribution's last run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ENDS = ("caught", "timed out", "survived", "equivalent")
HEAD = ("distribution", "changes tried", *ENDS, "noticed")


def note(file: Path, package: str, seed: int, count: Mapping[str, int], cut: int) -> None:
    """Keep the counts of a run, and those of other distributions that are there.

    Args:
        file: JSON, which is made if it is not there.
        package: the distribution.
        seed: of the sample.
        count: how many changes had each end.
        cut: how many survived without having been given every test.
    """
    told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    told[package] = {
        "seed": seed,
        "count": dict(count),
        "cut": cut,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    file.write_text(json.dumps(told, indent=1, sort_keys=True), encoding="utf-8")


def share(count: Mapping[str, int]) -> tuple[float, int]:
    """How many of the changes that matter were noticed, and how many matter."""
    matter = sum(count.values()) - count["equivalent"]
    return ((count["caught"] + count["timed out"]) / matter if matter else 1.0), matter


def page(told: Mapping[str, Any], packages: Iterable[str]) -> str:
    """For the documentation: a row for each distribution, run or not."""
    software = {f"torch {each['torch']}, Python {each['python']}" for each in told.values()}
    lines = [
        "# Changed lines, CPU",
        "",
        "- **Question**: of random changes of one token, how many do a distribution's own tests "
        "notice?",
        f"- **Hardware**: {os.cpu_count()} cores, CPU.",
        f"- **Software**: {'; '.join(sorted(software))}.",
        f"- **Date and entity**: {max(each['date'] for each in told.values())}, torchparts.",
        '- **Command**: `nox -s "mutate(PACKAGE)" -- --count 150 --seed 0`, each until no more '
        "tests were added; `python storm/mutate.py --page FILE` wrote this page.",
        "- **Target**: 95 % of 150 in each.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- " * len(HEAD) + "|",
    ]
    for name in packages:
        cells = [name, *["-"] * (len(HEAD) - 2), "not run"]
        if name in told:
            count = told[name]["count"]
            part, matter = share(count)
            ends = [count[end] for end in ENDS]
            cells = [name, sum(ends), *ends, f"{100 * part:.1f} % of {matter}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if cut := sum(each["cut"] for each in told.values()):
        lines += ["", f"Lower bounds: {cut} survived what they were given time for, and not all."]
    return "\n".join([*lines, ""])
