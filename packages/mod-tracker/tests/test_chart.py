"""What a chart shows."""

from __future__ import annotations

from mod_tracker.reports.charts._chart import LEAST, Chart
from mod_tracker.reports.charts._flame import frames_of


def test_what_is_too_narrow_is_not_drawn():
    """It still counts in the whole."""
    stacks = {("N",): {"forward": LEAST}, ("M",): {"forward": 1}, ("N", "N.0"): {"backward": 0}}
    chart = Chart("", tuple(frames_of(stacks)), str, str, str)
    assert chart.whole == LEAST + 1
    assert [frame.name for frame in chart.drawn] == ["N"]
