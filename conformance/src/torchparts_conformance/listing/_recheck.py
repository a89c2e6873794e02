"""Runs an entry's implementation again, in a fresh environment, and notes what came of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torchparts_conformance.listing import _entry
from torchparts_conformance.listing._entry import DIFFERENT, FAILED, VERIFIED, Day, Run
from torchparts_conformance.render import _render
from torchparts_conformance.report import _outcomes
from torchparts_conformance.verify import _rerun
from torchparts_conformance.verify._rerun import Source


def recheck(
    folder: Path, *, day: Day, by: str, source: Source, python: str | None = None
) -> list[str]:
    """Run an entry again and add the run to it.

    Args:
        folder: of the entry.
        day: of this run.
        by: address where the run can be looked at.
        source: of the environment that is made.
        python: interpreter of an environment that is ready.

    Returns:
        in what the second run differs; empty if it agrees.

    Raises:
        ReportError: the entry cannot be read, or what it names cannot be installed.
    """
    entry = _entry.read(folder)
    differences = _rerun.rerun(entry.report, adapter=entry.adapter, python=python, source=source)
    agreed = VERIFIED if entry.report["verdict"] == _outcomes.CONFORMANT else FAILED
    run = Run(day, DIFFERENT if differences else agreed, by)
    _render.write(folder / _entry.ENTRY, _entry.to_toml(replace(entry, runs=(*entry.runs, run))))
    return differences
