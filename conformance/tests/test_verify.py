"""A report that was edited or is about something else is not believed."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.render import _badge
from torchparts_conformance.report import _report
from torchparts_conformance.verify import _verify


def _resealed(report):
    """Do what a careful forger would: make digest and seal fit again."""
    forged = {**report, "digest": _report.digest(report)}
    return {**forged, "seal": _report.seal(forged)}


def _edited(report, change, *, reseal=True):
    forged = copy.deepcopy(report)
    change(forged)
    return _resealed(forged) if reseal else forged


def test_honest_report_is_believed(make_report, expected):
    """A report as written, with its badge, contradicts nothing."""
    report = make_report()
    (badge,) = _badge.badges(report)
    assert _verify.problems(report, _badge.to_svg(badge), expected) == []
    assert _verify.problems(report, _badge.to_shields(badge), expected) == []


FORGERIES = {
    "edited outcome": (lambda r: r["rows"][0].update(outcome="pass"), "does not follow"),
    "edited verdict": (lambda r: r.update(verdict="conformant"), "verdict does not follow"),
    "edited count": (lambda r: r["verdicts"][0].update(must=[1, 1]), "verdicts does not follow"),
    "edited version": (lambda r: r["implementation"].update(version="2"), "seal does not match"),
    "missing row": (lambda r: r["rows"].pop(0), "row CW-001 .* is missing"),
    "invented row": (lambda r: r["rows"][0].update(case="x.py::y"), "is no case"),
    "doubled row": (lambda r: r["rows"].append(r["rows"][0]), "a row is there twice"),
    "softened level": (lambda r: r["rows"][0].update(level="SHOULD"), "another area, level"),
    "hidden failure": (lambda r: r["rows"][0].update(outcome="not_claimed"), "was claimed"),
    "hidden as not provided": (
        lambda r: r["rows"][0].update(outcome="not_claimed", reason="ckpt-wrap is not provided"),
        "was claimed but is not judged",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_report_is_refused(make_report, expected, name):
    """Every edit shows, also where the forger made the seal fit again."""
    change, said = FORGERIES[name]
    report = make_report({"CW-001": "fail"})
    reseal = name != "edited version"
    problems = _verify.problems(_edited(report, change, reseal=reseal), None, expected)
    assert any(_found(said, text) for text in problems), problems


def _found(pattern, text):
    return re.search(pattern, text) is not None


def test_row_of_a_removed_case_is_refused(make_report, expected):
    fewer = dataclasses.replace(expected, cases=expected.cases[:1])
    (said,) = _verify.problems(make_report(), None, fewer)
    assert said == "row CW-002 ckpt_wrap/test_a.py::test_b cpu is no case"


def test_badge_of_another_report_is_refused(make_report, expected):
    """A badge belongs to one report: not to a better one, and not to somebody else's."""
    report = make_report({"CW-001": "fail"})
    for other in (make_report(), make_report({"CW-001": "fail"}, name="another")):
        (badge,) = _badge.badges(other)
        problems = _verify.problems(report, _badge.to_svg(badge), expected)
        assert problems == ["the badge is not the one this report gives"]


def test_report_of_another_implementation_is_refused(make_report, expected):
    """Who asks about one distribution is not given the report of another."""
    asked = dataclasses.replace(expected, distribution="mine==1.0")
    assert _verify.problems(make_report(), None, asked) == []
    (problem,) = _verify.problems(make_report(name="theirs"), None, asked)
    assert problem == "the report is not about mine==1.0"


def test_report_of_another_suite_is_said_to_be_one(make_report, expected):
    """Nothing can be said about the report of another version."""
    report = _edited(make_report(), lambda r: r["suite"].update(version="9.9"))
    with pytest.raises(ReportError, match=r"report is of suite '9\.9', but '0\.1\.0' is installed"):
        _verify.problems(report, None, expected)


def test_report_of_another_wheel_is_refused(make_report, expected):
    """A wheel is known by its bytes, not by its name."""

    report = make_report()
    report["implementation"]["distributions"][0]["wheel_sha256"] = "3" * 64
    report = _resealed(report)
    asked = dataclasses.replace(expected, wheel_sha256="3" * 64)
    assert _verify.problems(report, None, asked) == []
    same = report["implementation"]["distributions"][0]["sha256"]  # but another file: rebuilt
    asked = dataclasses.replace(expected, wheel_sha256="4" * 64, wheel_record_sha256=same)
    assert _verify.problems(report, None, asked) == ["the report is not about this wheel"]


@pytest.mark.parametrize(
    ("kind", "brought", "same"),
    [
        ("record", "5" * 64, True),
        ("record", "6" * 64, False),
        ("source", "5" * 64, False),
    ],
)
def test_wheel_whose_file_was_not_noted_is_known_by_what_it_brought(
    make_report, expected, kind, brought, same
):
    """As where uv installed it, or an index was asked; source in the tree is no wheel."""
    report = make_report()
    found = {"kind": kind, "sha256": "5" * 64, "wheel_sha256": None}
    report["implementation"]["distributions"][0].update(found)
    asked = dataclasses.replace(expected, wheel_sha256="3" * 64, wheel_record_sha256=brought)
    said = [] if same else ["the report is not about this wheel"]
    assert _verify.problems(_resealed(report), None, asked) == said
