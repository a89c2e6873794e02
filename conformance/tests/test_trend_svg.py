"""A trend's picture: well-formed, with a count for each point, and nothing by colour alone."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from torchparts_conformance.render import _trend_svg
from torchparts_conformance.render._trend import Point, Trend

_SVG = "{http://www.w3.org/2000/svg}"


def _report(passed, total, *, areas=("ckpt-wrap",)):
    word = "conformant" if passed == total else "not conformant"
    where = {"profile": "core", "group": "", "device": "cpu", "verdict": word}
    return {"verdicts": [{"area": a, "must": [passed, total], **where} for a in areas], "rows": []}


def _drawn(counts, name="mine", **options):
    points = {
        Point("0.1.0", f"2.{n}", "1"): _report(*count, **options) for n, count in enumerate(counts)
    }
    return ElementTree.fromstring(_trend_svg.to_svg(Trend(name, "cpu", points)))


def _texts(drawn):
    return ["".join(text.itertext()) for text in drawn.iter(f"{_SVG}text")]


def test_each_point_has_its_count_and_a_place_by_its_share():
    """Higher is more; what is not conformant is a ring."""
    drawn = _drawn([(1, 4), (2, 4), (4, 4)])
    assert [text for text in _texts(drawn) if "/" in text] == ["1/4", "2/4", "4/4"]
    circles = list(drawn.iter(f"{_SVG}circle"))
    heights = [float(circle.get("cy")) for circle in circles]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[1] > heights[2]
    assert [c.get("fill") == c.get("stroke") for c in circles] == [False, False, True]


def test_each_area_has_a_strip_below_the_one_before():
    """With its name, a line through its points, and no strip over another."""
    drawn = _drawn([(1, 2), (2, 2)], areas=("ckpt-wrap", "sac-policies"))
    assert {"ckpt-wrap", "sac-policies"} <= set(_texts(drawn))
    lines = [line.get("points").split() for line in drawn.iter(f"{_SVG}polyline")]
    tops = [[float(point.split(",")[1]) for point in line] for line in lines]
    assert max(tops[0]) < min(tops[1])
    assert float(drawn.get("height")) > max(tops[1])


def test_count_is_above_its_point_and_inside_the_picture():
    """No line goes through it, and a long name is not cut."""
    drawn = _drawn([(2, 2), (1, 2)], name="a name of somebody's that is rather long " * 2)
    counts = [text for text in drawn.iter(f"{_SVG}text") if "/" in text.text]
    for text, circle in zip(counts, drawn.iter(f"{_SVG}circle"), strict=True):
        assert text.get("x") == circle.get("cx")
        assert float(text.get("y")) <= float(circle.get("cy")) - float(circle.get("r"))
    title = next(text.text for text in drawn.iter(f"{_SVG}text"))
    assert float(drawn.get("width")) >= 7 * len(title)


def test_suite_and_torch_are_below_each_point():
    """As its column in the table says."""
    texts = _texts(_drawn([(1, 1), (1, 1)]))
    assert [text for text in texts if text.startswith("torch")] == ["torch 2.0", "torch 2.1"]
    assert texts.count("suite 0.1.0") == 2


@settings(deadline=None)  # a busy machine is slow
@given(name=st.text(alphabet="<>&\"' ab\N{GREEK SMALL LETTER PI}", min_size=1, max_size=20))
def test_name_of_a_stranger_is_text(name):
    """The picture stays one element tree, with the name in its title, and refers to nothing."""
    drawn = _drawn([(1, 1)], name=name)
    (title,) = drawn.iter(f"{_SVG}title")
    assert title.text == f"{name} on cpu: MUST requirements that passed"
    assert not any("href" in key for element in drawn.iter() for key in element.attrib)
    assert {element.tag.removeprefix(_SVG) for element in drawn.iter()} <= {
        *("svg", "title", "rect", "g", "text", "path", "polyline", "circle"),
    }
