"""Charts as a picture."""

from __future__ import annotations

import struct
import sys

import pytest
import torch
from torch import nn

from mod_tracker import MissingExtraError, profile_flops, profile_memory, profile_time, trace
from mod_tracker.reports.charts import Chart, frames_of, png

pytest.importorskip("matplotlib")


def _size(picture):
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", picture[16:24])


@pytest.mark.parametrize(
    "report_of", [profile_flops, profile_time, profile_memory, trace, lambda: trace(memory=True)]
)
def test_every_report_is_drawn(report_of, mlp, x):
    """A picture, in which nothing that pyplot shows has changed."""
    with report_of() as report:
        mlp(x).sum().backward()
    pyplot = sys.modules.get("matplotlib.pyplot")
    before = None if pyplot is None else pyplot.get_fignums()
    width, height = _size(report.to_png())
    assert width == 1200
    assert height > 100
    assert pyplot is None or pyplot.get_fignums() == before


def test_memory_over_time_takes_room(mlp, x):
    """Two charts in one picture."""
    heights = []
    for memory in (False, True):
        with trace(memory=memory) as report:
            mlp(x).sum().backward()
        heights.append(_size(report.to_png())[1])
    assert heights[1] > heights[0] + 200


def test_deeper_modules_make_a_higher_picture():
    """A row for each depth."""
    charts = [
        Chart("", tuple(frames_of({("N",) * depth: {"forward": 3}})), str, str, str)
        for depth in (1, 9)
    ]
    low, high = (_size(png(chart))[1] for chart in charts)
    assert high > low + 200


def test_empty_chart_is_drawn():
    """No frame, no legend, no error."""
    assert _size(png(Chart("", (), str, str, str)))[0] == 1200


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    """And what needs none."""
    with profile_flops() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"mod-tracker\[plot\], or use to_html"):
        report.to_png()
