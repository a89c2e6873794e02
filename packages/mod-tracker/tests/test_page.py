"""Charts as one HTML page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from mod_tracker import profile_flops, profile_memory, trace
from mod_tracker.reports.charts import Chart, frames_of, memory_line, page

VOID = {"meta", "rect", "polygon"}


class _Read(HTMLParser):
    """Tags and their attributes; every tag that is opened is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        """Note it."""
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta"}:
            self._open.append(tag)

    def handle_endtag(self, tag):
        """It ends what was begun last."""
        assert self._open.pop() == tag

    def handle_data(self, data):
        """Words between tags."""
        self.text.append(data)

    def frames(self):
        """Label and attributes of each frame."""
        return [attributes for tag, attributes in self.tags if tag == "button"]


def _chart(stacks, **more):
    return Chart("Title", tuple(frames_of(stacks)), lambda n: f"{n} u", str, str, **more)


def test_frames_are_as_wide_as_their_part():
    """The position is there for readers without a script, too."""
    read = _Read(
        page(_chart({("N", "N.a"): {"forward": 1, "backward": 2}, ("N",): {"forward": 1}}))
    )
    whole, inner = read.frames()
    assert (whole["data-at"], whole["data-part"]) == ("0.000000000", "1.000000000")
    assert "left:0.000000%;width:75.000000%;top:20px" in inner["style"]
    assert "#56b4e9 0.00%,#56b4e9 33.33%,#5fc9a6 33.33%,#5fc9a6 100.00%" in inner["style"]
    assert inner["title"] == "N.a: 3 u, 75.0% (forward 1 u, backward 2 u, itself 3 u)"
    assert whole["title"].endswith("itself 1 u)")
    assert {"N", "a", "forward", "backward"} <= set(read.text)
    assert "recompute" not in read.text


def test_bytes_of_no_phase_name_none():
    """Parameters are there in every phase."""
    (frame,) = _Read(page(_chart({("N",): {"": 4}}))).frames()
    assert frame["title"] == "N: 4 u, 100.0% (itself 4 u)"


def test_names_are_words_and_never_markup():
    """A module may have any name."""
    name = "</script><img src=x onerror=alert(1)>\"'&"
    text = page(_chart({(name,): {"forward": 1}}, notes=(name,)))
    read = _Read(text)
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in read.tags}
    assert read.frames()[0]["title"].startswith(name)


def test_memory_over_time_is_drawn_below():
    """Each area with its name and its most bytes; the strip says the phases."""
    changes = [(10, ("N",), 4), (20, (), 2), (30, ("N",), -4)]
    line = memory_line(changes, [(0, "forward"), (20, "backward"), (40, "outside")])
    read = _Read(page(_chart({("N",): {"forward": 1}}, line=line)))
    shapes = [tag for tag, _ in read.tags if tag in ("polygon", "rect")]
    assert shapes == ["polygon", "polygon", "rect", "rect", "rect"]
    assert {"N: at most 4", "(outside): at most 2"} <= set(read.text)
    points = next(a["points"] for tag, a in read.tags if tag == "polygon")
    strip = [attributes for tag, attributes in read.tags if tag == "rect"]
    assert [(a["x"], a["y"], a["width"], a["height"]) for a in strip] == [
        ("0.0", "264", "500.0", "10"),
        ("500.0", "264", "500.0", "10"),
        ("1000.0", "264", "0.0", "10"),
    ]
    # 4 of 6 bytes from a quarter of the time on, none from three quarters on
    assert points.startswith("250.0,86.7 500.0,86.7 500.0,86.7 750.0,86.7 750.0,260.0 1000.0,260.0")


def test_empty_report_is_a_page():
    """It says that there is nothing."""
    assert "Nothing was counted." in _Read(page(_chart({}))).text


def test_narrow_frames_are_counted():
    """Nobody takes the page for complete."""
    stacks = {("N",): {"forward": 10_000}, ("M",): {"forward": 1}, ("O",): {"forward": 1}}
    assert "Too narrow to draw, and left out: 2." in _Read(page(_chart(stacks))).text


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory, lambda: trace(memory=True)])
def test_page_of_a_report_is_one_file(report_of, mlp, x):
    """It asks for nothing elsewhere, and its frames add up to the report's total."""
    with report_of() as report:
        mlp(x).sum().backward()
    read = _Read(report.to_html())
    assert not any({"src", "href"} & set(attributes) for _, attributes in read.tags)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", report.to_html())
    widest = [frame for frame in read.frames() if "top:0px" in frame["style"]]
    assert sum(float(frame["data-part"]) for frame in widest) == pytest.approx(1)
    said = " ".join(read.text) + " ".join(frame["title"] for frame in read.frames())
    assert "MLP.a" in said
    assert ("Memory over time" in read.text) == (type(report).__name__ == "TraceReport")


def test_trace_without_memory_has_no_line():
    """Nothing followed allocations."""
    with trace() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert "Memory over time" not in report.to_html()
