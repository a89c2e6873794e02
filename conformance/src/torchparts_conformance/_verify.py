"""Run a sample of the requirements of a report again.

A report can be written without running anything. Only another run of the implementation shows
whether its passes are true.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance._process import run_cases


def sample(report: Mapping[str, Any], count: int, seed: int) -> list[str]:
    """Choose requirements that the report has run, in order of their ids."""
    ran = {row["id"] for row in report["rows"] if row["outcome"] in ("pass", "fail", "error")}
    return sorted(random.Random(seed).sample(sorted(ran), min(count, len(ran))))


def rerun(report: Mapping[str, Any], ids: list[str], *, impl: str, jobs: int) -> list[str]:
    """Run the cases of some requirements again and return the differences.

    Args:
        report: to compare with.
        ids: of the requirements.
        impl: the implementation, named by the person who verifies: a report does not choose
            which code is imported.
        jobs: processes at a time.
    """
    again = run_cases([f"--requirement={','.join(ids)}", *options(report, impl)], jobs=jobs)
    before = _outcomes(report, ids)
    return [
        f"{' '.join(key)} is {before.get(key, 'absent')} in the report, and {outcome} now"
        for key, outcome in _outcomes(again, ids).items()
        if before.get(key) != outcome
    ]


def options(report: Mapping[str, Any], impl: str) -> list[str]:
    """Return the options of the run that made a report."""
    claims = report["claims"]
    found = [f"--impl={impl}", f"--area={','.join(claims['areas'])}"]
    found.append(f"--device={','.join(claims['devices'])}")
    return [*found, f"--profile={','.join(claims['profiles'])}"] if claims["profiles"] else found


def _outcomes(report: Mapping[str, Any], ids: list[str]) -> dict[tuple[str, str, str], str]:
    """Return outcomes by row; a known failure counts as a failure."""
    same = {"xfail": "fail", "xpass": "pass"}
    rows = [row for row in report["rows"] if row["id"] in ids]
    return {_report.row_key(row): same.get(row["outcome"], row["outcome"]) for row in rows}
