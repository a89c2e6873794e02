"""Pictures on pages are drawn from what they show."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(params=["draw_trace", "draw_shard"])
def drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that draws one of them."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module(request.param)


def test_picture_is_that_of_its_source(drawing: ModuleType) -> None:
    """The committed trace, and the plan of today's `plan_shard`."""
    if drawing.__name__ == "draw_trace":
        source, name = json.loads((HERE / "trace.json").read_text(encoding="utf-8")), "trace"
    else:
        source, name = drawing.planned(), "shard"
    assert (HERE.parent / f"{name}.svg").read_text(encoding="utf-8") == drawing.draw(source)


def test_step_of_home_page_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve is drawn from the committed bytes; its peak halves, and pages say the same ones."""
    monkeypatch.syspath_prepend(str(HERE))
    draw = importlib.import_module("draw_step").draw
    measured = json.loads((HERE / "step.json").read_text(encoding="utf-8"))
    assert (HERE.parent / "step.svg").read_text(encoding="utf-8") == draw(measured)
    assert all(run["peak_bytes"] == max(run["live_bytes"]) for run in measured["runs"])
    plain, ours = (run["peak_bytes"] / 2**20 for run in measured["runs"])
    assert plain > 2 * ours
    said = (
        f"peak memory of a training step of this Llama falls from {plain:.1f} MiB to {ours:.1f} MiB"
    )
    for page in (HERE.parent / "index.md", HERE.parent.parent / "README.md"):
        assert said in page.read_text(encoding="utf-8"), page
    with pytest.raises(ValueError, match="gradients differ"):
        draw(measured | {"equal": False})


def test_trace_has_what_its_picture_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs again between forward and its own backward, the last one first."""
    monkeypatch.syspath_prepend(str(HERE))
    calls = importlib.import_module("draw_trace").calls
    bars = calls(json.loads((HERE / "trace.json").read_text(encoding="utf-8"))["traceEvents"])
    longest = {}
    for bar in sorted(bars, key=lambda bar: bar.stop - bar.start):
        longest[bar.name, bar.phase] = bar
    order = sorted((bar.start, key) for key, bar in longest.items() if key[0].count(".") == 1)
    names = ("Sequential.0", "Sequential.1")
    assert [key for _, key in order if key[0] in names] == [
        *[("Sequential.0", "forward"), ("Sequential.1", "forward")],
        *[("Sequential.1", "recompute"), ("Sequential.1", "backward")],
        *[("Sequential.0", "recompute"), ("Sequential.0", "backward")],
    ]
