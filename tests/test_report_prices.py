"""The picture and the tables of what reports cost are those of the committed run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/benchmarks"
RESULT = json.loads((FOLDER / "reports.json").read_text(encoding="utf-8"))


def test_picture_is_drawn_from_the_committed_run() -> None:
    """The same numbers always give the same file."""
    path = ROOT / "packages/mod-tracker/benchmarks/draw_reports.py"
    spec = importlib.util.spec_from_file_location("draw_reports", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (FOLDER / "reports.svg").read_text(encoding="utf-8") == module.draw(RESULT)


def test_tables_are_those_of_the_committed_run() -> None:
    """Every row, with its ranges."""
    page = (FOLDER / "calls-steps-and-ranks_cpu_2026-11_torchparts.md").read_text(encoding="utf-8")
    for found in RESULT["widths"].values():
        for name, row in found["rows"].items():
            spans = []
            for column in ("first", "later", "mean"):
                low, high = (f"{value:.2f}" for value in row[column])
                spans.append(low if low == high else f"{low} to {high}")
            assert f"\n| {name} | {' | '.join(spans)} |" in page
