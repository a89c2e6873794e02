"""A badge follows from its report: it is bright green for all that was asked, and harmless."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from torchparts_conformance.render import _badge
from torchparts_conformance.report import _report


@pytest.mark.parametrize(
    ("outcomes", "devices", "message", "color"),
    [
        ({}, ("cpu",), "core+robust 1/1 | cpu", "brightgreen"),
        ({}, ("cpu", "cuda"), "core+robust 2/2 | cpu, cuda", "brightgreen"),
        ({"CW-001": "fail"}, ("cpu",), "not conformant 0/1 | cpu", "red"),
        ({"CW-002": "not_run"}, ("cpu",), "core 1/1, not robust 0/0 | cpu", "yellow"),
        ({"CW-001": "no_device", "CW-002": "no_device"}, ("cuda",), "cuda: not run", "lightgrey"),
        ({"CW-001": "xfail"}, ("cpu",), "not conformant 0/1 | cpu", "red"),
        ({"CW-001": "not_provided"}, ("cpu",), "not conformant 0/1 | cpu", "red"),
        (
            {"CW-001": "not_provided", "CW-002": "not_provided"},
            ("cpu",),
            "not provided",
            "lightgrey",
        ),
        (
            {"CW-001": "not_claimed", "CW-002": "not_claimed"},
            ("cpu",),
            "not provided",
            "lightgrey",
        ),
    ],
)
def test_badge_says_exactly_what_was_shown(make_report, outcomes, devices, message, color):
    """Bright green only if all that was asked about passed; counts are exact."""
    (badge,) = _badge.badges(make_report(outcomes, devices=devices))
    assert (badge.message, badge.color) == (message, color)
    assert badge.label == "ckpt-wrap 0.1.0"


def test_badge_is_a_harmless_picture(make_report):
    """The SVG parses, has a title and the digest, and refers to nothing outside."""
    report = make_report(name="<script>x</script>")
    (badge,) = _badge.badges(report)
    svg = _badge.to_svg(badge)
    root = ET.fromstring(svg)
    assert "<script" not in svg
    assert root.find("{*}title").text.endswith("core+robust 1/1 | cpu")
    assert root.find("{*}metadata").text == report["digest"]
    assert svg.count("http") == 1  # the name space
    shields = json.loads(_badge.to_shields(badge))
    assert {"schemaVersion", "label", "message"} <= shields.keys()


GROUPED = {
    ("wrapping", "core"): "pass",
    ("wrapping", "robust"): "pass",
    ("offloading", "core"): "not_provided",
    ("offloading", "robust"): "not_provided",
    ("", "compile"): "not_claimed",
}


def _report_of(make_report, outcomes):
    """Give a report with a row for each group and profile."""
    report = make_report()
    rows = [
        {**report["rows"][0], "id": f"CW-{n:03}", "group": g, "profile": p, "outcome": outcome}
        for n, ((g, p), outcome) in enumerate(outcomes.items(), 1)
    ]

    words = ("suite", "implementation", "environment", "claims", "problems")
    return _report.build(rows=rows, **{word: report[word] for word in words})


@pytest.mark.parametrize(
    ("changes", "verdict", "message"),
    [
        ({}, "conformant", "wrapping: core+robust 2/2 | cpu"),
        ({("offloading", "robust"): "pass"}, "not conformant", None),
        ({("wrapping", "robust"): "not_provided"}, "not conformant", None),
        ({("wrapping", "core"): "fail"}, "not conformant", "wrapping: not conformant 1/2 | cpu"),
        ({("", "compile"): "not_provided"}, "not conformant", None),
        (
            {("offloading", "core"): "pass", ("offloading", "robust"): "pass"},
            "conformant",
            "core+robust 4/4 | cpu",
        ),
    ],
)
def test_group_counts_whole_or_not_at_all(make_report, changes, verdict, message):
    """What is not there at all is not counted, and named; what is there in part is not enough."""
    report = _report_of(make_report, {**GROUPED, **changes})
    assert report["verdict"] == verdict
    badge = _badge.badge(report, "ckpt-wrap")
    assert message is None or badge.message == message
    assert (badge.color == "brightgreen") == (verdict == "conformant")
