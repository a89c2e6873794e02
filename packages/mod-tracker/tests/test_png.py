"""Charts as a picture."""

from __future__ import annotations

import struct
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

from mod_tracker import MissingExtraError, profile_flops, profile_memory, profile_time, trace
from mod_tracker.reports.charts import Chart, _png, frames_of, memory_line, png
from mod_tracker.reports.charts._colours import PHASES

figure = pytest.importorskip("matplotlib.figure")


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


def test_labels_stand_in_the_middle_of_their_frames():
    """Where the frame begins, and half a row below its upper edge; none in a narrow frame."""
    frames = frames_of({("N",): {"forward": 1}, ("N", "N.a"): {"forward": 99}})
    axes = figure.Figure().subplots()
    _png._draw_flame(axes, Chart("", tuple(frames), str, str, str), 2)
    places = {text.get_text().strip(): text.get_position() for text in axes.texts}
    assert places == {"N": (0, 0.5), "a": (0, 1.5)}


def test_areas_are_named_and_the_strip_lies_below_them():
    """What no module made is named too; each phase has its colour, from its begin to its end."""
    changes = [(10, ("N",), 4), (20, (), 2), (30, ("N",), -4)]
    line = memory_line(changes, [(0, "forward"), (20, "backward"), (40, "outside")])
    axes = figure.Figure().subplots()
    _png._draw_memory(axes, line, str, str)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["N", "(outside)"]
    strip = [(span.get_x(), span.get_width()) for span in axes.patches]
    assert strip == [(0, 20), (20, 20), (40, 0)]
    assert {(span.get_y(), span.get_height()) for span in axes.patches} == {(0, 0.03)}
    to_hex = import_module("matplotlib.colors").to_hex
    colours = [to_hex(span.get_facecolor()) for span in axes.patches]
    assert colours == [PHASES[phase] for phase in ("forward", "backward", "outside")]
