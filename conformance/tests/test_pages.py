"""Badges, summaries, the results file and the pages of the site."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from torchparts_conformance import _badge, _cli, _pages, _results, _summary
from torchparts_conformance._errors import ReportError, printable
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._cases import cases_by_id, load_registry

PUBLISHED = Path(__file__).parents[2] / "docs/conformance/results.json"


@pytest.mark.parametrize(
    ("outcomes", "message", "color"),
    [
        ({}, "core 1 of 1 | cpu", "brightgreen"),
        ({"CW-003": "fail"}, "core 1 of 1 | cpu", "brightgreen"),
        ({"CW-001": "fail"}, "core 0 of 1 | cpu", "red"),
        (
            dict.fromkeys(("CW-001", "CW-002", "CW-003"), "not_provided"),
            "not provided",
            "lightgrey",
        ),
    ],
)
def test_badge_says_counts_and_has_the_colour_of_the_verdict(make_report, outcomes, message, color):
    (badge,) = _badge.badges(make_report(outcomes))
    assert (badge.message, badge.color) == (message, color)
    assert badge.label == "ckpt-wrap 0.1.0"


def test_badge_names_each_device(make_report):
    outcomes = {"CW-002": "not_claimed", "CW-003": "not_claimed"}
    (badge,) = _badge.badges(make_report(outcomes, devices=("cpu", "cuda")))
    assert badge.message == "core 1 of 1 | cpu, core 1 of 1 | cuda"


def test_picture_is_xml_and_shows_markup_as_text(make_report):
    (badge,) = _badge.badges(make_report(name='<b>&"\x1b'))
    root = ET.fromstring(_badge.to_svg(badge))
    assert root.get("aria-label", "").startswith('<b>&"\N{REPLACEMENT CHARACTER} 1.0: ckpt-wrap')


def test_summary_shows_each_reason_once_with_the_command_to_repeat_it(make_report):
    report = make_report({"CW-001": "fail", "CW-003": "fail"}, reason="expected `1 == 2`")
    lines = _summary.summary(report, load_registry())
    assert lines[:6] == [
        "CW-001 MUST core, cpu: fail",
        "  It MUST work.",
        "  expected `1 == 2`",
        "  also    CW-003",
        "  repeat  torchparts-conformance run --impl mine:adapter --explain CW-001",
        "",
    ]
    assert lines[-4:] == [
        "ckpt-wrap     cpu   not conformant: core 0 of 1",
        "beside it; these are torchparts' own requirements, and no part of the verdict:",
        "ckpt-wrap     cpu   robust 0 of 0 (SHOULD 1 of 1); in-place 0 of 1",
        "mine: not conformant",
    ]


def test_summary_shows_a_requirement_once_and_core_first(make_report):
    report = make_report({"CW-001": "fail", "CW-003": "fail"})
    for number, row in enumerate(report["rows"]):
        row["reason"] = f"reason {number}"
    first = report["rows"][0]
    report["rows"] = [
        report["rows"][2],
        first,
        {**first, "case": "other", "reason": "another reason"},
    ]
    heads = [line for line in _summary.summary(report, load_registry()) if ": fail" in line]
    assert heads == ["CW-001 MUST core, cpu: fail", "CW-003 MUST in-place, cpu: fail"]


def test_terminal_gets_no_control_characters_and_ci_no_commands():
    assert printable("a\x1b[31m\n") == "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    assert printable(" ::error::x").startswith("\N{REPLACEMENT CHARACTER}")


def test_explanation_names_reason_source_and_cases():
    requirement = load_registry()["CW-001"]
    lines = _summary.explained(requirement, cases_by_id()["CW-001"])
    assert lines[0].startswith("CW-001: ")
    assert any("test_checkpoint_wrapper.py::CheckpointWrapperTest::" in line for line in lines)
    assert any(line.startswith("  case     ckpt_wrap/") for line in lines)
    assert "def test_state_dict_of_wrapped_loads_into_plain(part, device):" in lines


@pytest.fixture
def publish(suite, stored, tmp_path):
    """`publish(...)` publishes reports with changes; returns code and results."""

    def publish(*reports):
        paths = [str(stored(place=f"{n}.json", **changes)) for n, changes in enumerate(reports)]
        code = _cli.main(["publish", str(tmp_path / "results.json"), *paths])
        return code, _results.read(tmp_path / "results.json")

    return publish


def test_verdicts_follow_from_the_results(publish, make_report):
    changes = {"outcomes": {"CW-001": "fail", "CW-002": "not_provided"}, "devices": ("cpu", "cuda")}
    code, (cpu, cuda) = publish(changes)
    report = make_report(**changes)
    assert code == 0
    again = [_results.verdicts_of(result, load_registry()) for result in (cpu, cuda)]
    assert [v for r in again for v in r["verdicts"]] == report["verdicts"]
    assert (cpu.card, cuda.card, cuda.date) == (None, "A card", report["date"])


def test_newer_report_replaces_that_of_its_adapter_and_device(publish):
    publish({}, {"adapter": "fsdp1"})
    code, found = publish({"outcomes": {"CW-001": "fail"}, "devices": ("cuda",)}, {})
    assert code == 0
    places = [(r.adapter, r.device) for r in found]
    assert places == [("fsdp1", "cpu"), ("mine:adapter", "cpu"), ("mine:adapter", "cuda")]
    assert found[2].outcomes == {"CW-001": "fail"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problems": ("odd",)}, "odd"),
        ({"outcomes": {"CW-002": "not_run"}}, "cases were left out"),
        (
            {"outcomes": {"CW-001": "no_device"}, "devices": ("cuda",)},
            "requested device was missing",
        ),
    ],
)
def test_unsound_report_is_not_published(publish, capsys, changes, said):
    assert publish(changes) == (1, [])
    assert said in capsys.readouterr().err


def test_requirements_that_came_or_went_since_a_run_are_not_counted(publish, make_report):
    _, (found,) = publish({})
    outcomes = {"CW-001": "pass", "CW-777": "fail"}
    older = _results.Result(**{**vars(found), "outcomes": outcomes})
    text = _results.to_text([older], load_registry())
    (again,) = json.loads(text)["implementations"]
    assert again["outcomes"]["ckpt-wrap"] == "P  "
    (verdict,) = _results.verdicts_of(older, load_registry())["verdicts"]
    assert (verdict["profile"], verdict["must"]) == ("core", [1, 1])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"requirements": {}, "implementations": [1]}'])
def test_other_file_is_no_results_file(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ReportError, match=r"results 'results\.json' cannot be used"):
        _results.read(tmp_path / "results.json")


@pytest.mark.skipif(not PUBLISHED.exists(), reason="only in the repository")
def test_published_results_are_small_and_fill_the_page():
    assert PUBLISHED.stat().st_size < 50_000
    page = _pages.results_page(_results.read(PUBLISHED))
    assert page.count("\n## ") == len(AREAS)
    assert re.search(r"\| torchparts, cpu \| (\d+) of \1 \| ", page)
    assert re.search(r"\| torchparts [\d.]+ \| 2[\d.]+\+cpu \| 20[\d-]+ \| ", page)


def test_results_page_counts_what_is_provided_and_names_what_failed(publish):
    _, found = publish(
        {"outcomes": {"CW-001": "fail", "CW-003": "not_provided"}},
        {"devices": ("cuda",), "adapter": "other:one", "name": "a|b"},
    )
    page = _pages.results_page(found)
    assert "| | core | robust | in-place |" in page
    assert "| mine, cpu | 0 of 1 | 0 of 0 |  |" in page
    assert "- mine, cpu: **[CW-001](spec-ckpt-wrap.md#cw-001)**" in page
    assert "- a&#124;b, cuda: none" in page
    day = found[0].date
    assert f"| mine 1.0 | 2.13.0 | {day} | not run |" in page
    assert f"| a&#124;b 1.0 | 2.13.0 | not run | cuda, A card, {day} |" in page


def test_requirement_pages_have_a_line_and_a_section_for_each(package):
    pages = _pages.requirement_pages()
    assert set(pages) == {f"spec-{area}.md" for area in AREAS}
    for requirement in load_registry().values():
        page = pages[f"spec-{requirement.area}.md"]
        assert f"## {requirement.id}\n" in page
        assert f"[{requirement.id}](#{requirement.id.lower()}) | {requirement.level}" in page
    assert (
        "from [`test_fqn`](https://github.com/pytorch/pytorch/blob/v" in pages["spec-ckpt-wrap.md"]
    )


def test_text_stays_in_its_cell():
    assert _pages.escape(" a | <b>\n\nc ") == r"a \| &lt;b&gt; c"
    assert _pages.markdown("[a](b) *c* www.x") == (
        "&#91;a&#93;(b) &#42;c&#42; www\N{ZERO WIDTH SPACE}.x"
    )
