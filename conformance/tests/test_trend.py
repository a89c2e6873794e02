"""One implementation over versions of the suite and of torch, as a table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchparts_conformance.render import _trend
from torchparts_conformance.render._trend import Point
from torchparts_conformance.report import _report


@pytest.fixture
def at(make_report):
    """Give a function that makes a report of a suite, a torch and a version."""

    def make(torch="2.13.0", *, suite="0.1.0", version="1.0", by="", **changes):
        report = make_report(**changes)
        report["environment"]["torch"] = torch
        report["implementation"]["version"] = version
        report["suite"] |= {"version": suite}
        if by:
            report["suite"] |= {"list": {"version": by, "sha256": "1" * 64}}
        return report | _report.derived(report)

    return make


def test_point_is_the_list_the_torch_and_the_version(at):
    """Of torch the minor counts; an earlier list is where a report stands, whoever ran it."""
    assert _trend.point_of(at("2.9.1+cu128")) == Point("0.1.0", "2.9", "1.0")
    assert _trend.point_of(at(suite="0.3.0", by="0.2.0")).suite == "0.2.0"
    assert _trend.point_of(at("nightly")).torch == "nightly"


def test_points_are_in_the_order_of_versions(at):
    """0.10 comes after 0.9, torch 2.13 after 2.9, and what is no version last."""
    given = [("2.13.0", "0.9.0"), ("nightly", "0.9.0"), ("2.9.0", "0.10.0"), ("2.9.0", "0.9.0")]
    (trend,) = _trend.trends([at(torch, suite=suite) for torch, suite in given])
    assert [(p.suite, p.torch) for p in trend.points] == [
        ("0.9.0", "2.9"),
        ("0.9.0", "2.13"),
        ("0.9.0", "nightly"),
        ("0.10.0", "2.9"),
    ]


def test_later_report_of_one_point_counts(at):
    """What was published last is what the implementation does."""
    (trend,) = _trend.trends([at(outcomes={"CW-001": "fail"}), at()])
    ((count,),) = [counts.values() for counts in trend.areas().values()]
    assert (count.passed, count.total, count.is_conformant) == (1, 1, True)


def test_implementations_and_devices_are_apart(at):
    """Each has a trend of its own; one that has nothing has none."""
    reports = [at(name="a"), at(name="b", devices=("cpu", "cuda"))]
    absent = {"CW-001": "not_provided", "CW-002": "not_provided"}
    made = _trend.trends([*reports, at(name="c", outcomes=absent)])
    assert [(t.name, t.device) for t in made] == [("a", "cpu"), ("b", "cpu"), ("b", "cuda")]


def test_steps_name_what_passes_since_and_what_does_not(at):
    """By requirement, between points that follow each other."""
    reports = [
        at("2.9.0", outcomes={"CW-001": "fail"}),
        at("2.11.0"),
        at("2.13.0", outcomes={"CW-002": "error"}),
    ]
    (trend,) = _trend.trends(reversed(reports))
    steps = [step for _, _, step in trend.steps()]
    assert steps[0].since == ("CW-001",)
    assert steps[0].lost == ()
    assert (steps[1].since, steps[1].lost) == ((), ("CW-002",))
    page = _trend.to_markdown([trend], {})
    assert "- suite 0.1.0, torch 2.9 to suite 0.1.0, torch 2.11: CW-001 pass since." in page
    assert "CW-002 no longer pass." in page


def test_steps_name_requirements_that_came_and_went(at):
    """A newer suite asks for more, and may have withdrawn something."""
    old, new = at(suite="0.1.0"), at(suite="0.2.0")
    old["rows"] = [row for row in old["rows"] if row["id"] == "CW-001"]
    (trend,) = _trend.trends([old, new])
    ((_, _, step),) = trend.steps()
    assert (step.came, step.gone) == (("CW-002",), ())
    ((_, _, back),) = _trend.trends(
        [{**new, "suite": old["suite"]}, {**old, "suite": new["suite"]}]
    )[0].steps()
    assert (back.came, back.gone) == ((), ("CW-002",))


def test_table_has_a_cell_for_each_point(at):
    """A dash where a profile was not asked for, and the count where it was."""
    less = at("2.9.0")
    less["verdicts"] = [v for v in less["verdicts"] if v["profile"] == "core"]
    (trend,) = _trend.trends([less, at("2.13.0", outcomes={"CW-001": "fail"})])
    page = _trend.to_markdown([trend], {_trend.slug(trend): "trend/mine-cpu.svg"})
    assert "| profile | suite 0.1.0, torch 2.9 | suite 0.1.0, torch 2.13 |" in page
    assert "| ckpt-wrap core | conformant 1/1 | not conformant 0/1 |" in page
    assert "| ckpt-wrap robust | - | conformant 0/0 |" in page
    assert "![mine, cpu: what passed, by area](trend/mine-cpu.svg)" in page
    assert "There is one version of the suite so far" in page


def test_several_suites_and_versions_are_said(at):
    """A column names the implementation's version where there are several."""
    reports = [at(suite="0.1.0", version="1.0"), at(suite="0.2.0", version="1.1")]
    page = _trend.to_markdown(_trend.trends(reports), {})
    assert "Versions of the suite: 0.1.0, 0.2.0." in page
    assert "suite 0.2.0, torch 2.13, version 1.1" in page
    assert "one version of the suite so far" not in page


def test_two_states_of_one_version_are_said(at):
    """Before a version is released its cases change, and its reports with them."""
    two = [at("2.9.0"), at("2.13.0")]
    said = "made with different states of it"
    assert said not in _trend.to_markdown(_trend.trends(two), {})
    two[0]["suite"]["manifest_sha256"] = "2" * 64
    assert said in _trend.to_markdown(_trend.trends(two), {})


def test_one_report_is_no_trend(at):
    """It is named at the end, without a table."""
    page = _trend.to_markdown(_trend.trends([at()]), {})
    assert "has one report, in the [matrix](matrix.md): mine on cpu." in page
    assert "| profile |" not in page


def test_names_are_no_markup(at):
    """A stranger's name and versions are text."""
    odd = "<b>[x](javascript:1)|"
    page = _trend.to_markdown(_trend.trends([at("2.9.0", name=odd), at("2.13.0", name=odd)]), {})
    assert "<b>" not in page
    assert "](javascript" not in page


@settings(deadline=None)  # a busy machine is slow
@given(
    points=st.lists(
        st.tuples(st.sampled_from(["0.1.0", "0.2.0"]), st.sampled_from(["2.9", "2.10", "2.13"])),
        min_size=1,
        max_size=6,
        unique=True,
    ),
    data=st.data(),
)
def test_order_of_reports_changes_nothing(points, data):
    """Where each point has one report, a trend does not depend on how they were given."""

    def report(suite, torch):
        return {
            "suite": {"version": suite, "manifest_sha256": None},
            "environment": {"torch": f"{torch}.0"},
            "implementation": {"name": "mine", "version": "1"},
            "claims": {"devices": ["cpu"]},
            "verdicts": [
                {
                    "area": "ckpt-wrap",
                    "profile": "core",
                    "group": "",
                    "device": "cpu",
                    "verdict": "conformant",
                    "must": [1, 1],
                }
            ],
            "rows": [],
        }

    reports = list(itertools.starmap(report, points))
    shuffled = data.draw(st.permutations(reports))
    pages = {_trend.to_markdown(_trend.trends(order), {}) for order in (reports, shuffled)}
    assert len(pages) == 1
