"""Reports: what they say, that they read back, and that nothing in them is believed blindly."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import jsonschema
import pytest

from torchparts_conformance._errors import RegistryError, ReportError
from torchparts_conformance.render import _badge, _junit
from torchparts_conformance.report import _diff, _predicate, _report, _schema
from torchparts_conformance.verify import _verify

EVIL = "<script>alert(1)</script>\"'&\x1b[31m\x00../../etc"


def test_report_follows_its_published_schema(make_report):
    """What is written is valid under the schema that is published."""
    schema = json.loads(_report.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(make_report(), schema)
    assert _schema.violation(make_report(), schema) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rows", 0, "outcome"), "perfect"),
        (("rows", 0, "id"), "CW-1"),
        (("rows", 0, "duration_s"), -1),
        (("rows", 0, "reason"), "x" * 501),
        (("suite", "frozen"), 1),
        (("complete",), False),
        (("verdicts", 0, "must"), [1]),
        (("implementation", "name"), ""),
        (("extra",), 1),
    ],
)
def test_schema_refuses_what_jsonschema_refuses(make_report, path, value):
    """The suite's own reader of schemas agrees with the reference validator."""
    report = make_report()
    inner = report
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    schema = json.loads(_report.SCHEMA_FILE.read_text())
    assert not jsonschema.Draft202012Validator(schema).is_valid(report)
    assert _schema.violation(report, schema).startswith("report")


def test_digest_leaves_out_times_and_reasons_but_not_outcomes(make_report):
    """Two runs of the same thing agree; a different outcome does not."""
    assert make_report()["digest"] == make_report(reason="slow today")["digest"]
    assert make_report()["digest"] != make_report({"CW-001": "fail"})["digest"]
    assert make_report()["seal"] != make_report(reason="slow today")["seal"]


@pytest.mark.parametrize(
    ("outcomes", "verdict", "code"),
    [
        ({}, "conformant", 0),
        ({"CW-002": "fail"}, "conformant", 0),
        ({"CW-001": "fail"}, "not conformant", 1),
        ({"CW-001": "error"}, "not conformant", 1),
        ({"CW-001": "xfail"}, "announced failures", 0),
        ({"CW-001": "xpass"}, "not conformant", 1),
        ({"CW-002": "not_run"}, "not conformant", 1),
        ({"CW-001": "no_device", "CW-002": "no_device"}, "no device", 3),
        ({"CW-001": "not_claimed", "CW-002": "not_claimed"}, "not provided", 1),
        ({"CW-001": "not_provided", "CW-002": "not_provided"}, "not provided", 1),
        ({"CW-001": "not_provided"}, "not conformant", 1),
        ({"CW-002": "not_provided"}, "not conformant", 1),
    ],
)
def test_verdict_and_exit_code(make_report, outcomes, verdict, code):
    """A MUST decides, a SHOULD is shown, and nothing that did not run counts as done."""
    report = make_report(outcomes)
    assert (report["verdict"], _report.exit_code(report)) == (verdict, code)


@pytest.mark.parametrize("changes", [{"is_frozen": False}, {"problems": ("stale",)}])
def test_unsound_run_is_not_conformant(make_report, changes):
    """A changed suite or an untrue announcement spoils a run that passed."""
    assert make_report(**changes)["verdict"] == "not conformant"


def _stored(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_report_reads_back(make_report, tmp_path):
    """A stored report is the report."""
    report = make_report({"CW-001": "fail"}, reason=EVIL.replace("\x00", ""))
    assert _report.read(_stored(tmp_path, _report.to_text(report))) == report


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text[: len(text) // 2], "is no whole JSON file"),
        (lambda text: "", "is no whole JSON file"),
        (lambda text: "[" * 100_000, "is no whole JSON file"),
        (lambda text: text.replace("0.1", "NaN"), "NaN is not JSON"),
        (lambda text: text.replace("0.1", "1e999"), "is inf, but 1000000000 is the most"),
        (lambda text: text.replace('"complete"', '"seal": "", "complete"'), "a key is there twice"),
        (lambda text: text.replace("report:1", "report:2"), "but this suite reads"),
        (lambda text: text.replace('"complete": true', '"complete": false'), "breaks its schema"),
        (lambda text: "[]", "has schema None"),
    ],
)
def test_unreadable_report_is_one_clear_line(make_report, tmp_path, spoil, said):
    """A cut, foreign or hostile file is refused in a line that names it."""
    path = _stored(tmp_path, spoil(_report.to_text(make_report())))
    with pytest.raises(ReportError, match=said) as caught:
        _report.read(path)
    assert "report.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_oversized_reports_are_refused(tmp_path, monkeypatch):
    """A file that is not there or larger than allowed is not read."""
    with pytest.raises(ReportError, match="cannot be read"):
        _report.read(tmp_path / "none.json")
    monkeypatch.setattr(_report, "MAX_BYTES", 10)
    with pytest.raises(ReportError, match="exceeds 10 bytes"):
        _report.read(_stored(tmp_path, " " * 11))


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
    "other manifest": (lambda r: r["suite"].update(manifest_sha256="0" * 64), "manifest is not"),
    "missing row": (lambda r: r["rows"].pop(0), "row CW-001 .* is missing"),
    "invented row": (lambda r: r["rows"][0].update(case="x.py::y"), "is no case"),
    "doubled row": (lambda r: r["rows"].append(r["rows"][0]), "a row is there twice"),
    "softened level": (lambda r: r["rows"][0].update(level="MAY"), "another area, level"),
    "hidden failure": (lambda r: r["rows"][0].update(outcome="not_claimed"), "was claimed"),
    "hidden as not provided": (
        lambda r: r["rows"][0].update(outcome="not_claimed", reason="ckpt-wrap is not provided"),
        "was claimed but is not judged",
    ),
    "changed suite": (lambda r: r["suite"].update(frozen=False), "differed from its frozen"),
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


def test_frozen_row_of_no_requirement_is_refused(make_report, expected, registry):
    """A case that was removed is missed, though the report has every row that is left."""
    report = _edited(make_report(), lambda r: r["rows"].pop(1))
    del registry["CW-002"]
    report = _resealed(report | _report.derived(report))
    with pytest.raises(RegistryError, match=r"frozen list has CW-002 .*no such requirement"):
        _verify.problems(report, None, expected)


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


def test_junit_tells_failures_errors_and_skips_apart(make_report):
    """Each row is a test case with its requirement, level and device."""
    report = make_report({"CW-001": "fail", "CW-002": "error"}, reason=EVIL)
    root = ET.fromstring(_junit.to_junit(report))
    (suite,) = root.findall("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "1")
    case = suite.find("testcase")
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["requirement"] == "CW-001"
    assert (properties["level"], properties["device"]) == ("MUST", "cpu")
    assert "<script>" in case.find("failure").get("message")


def test_diff_lists_regressions_first(make_report):
    """What passed and does not any more comes first; a MUST among it blocks."""
    old = make_report({"CW-002": "fail"})
    new = make_report({"CW-001": "fail"})
    first, second = _diff.compare(old, new)
    assert str(first) == "regressed CW-001 MUST cpu ckpt_wrap/test_a.py::test_a: pass -> fail"
    assert (first.blocks, second.blocks) == (True, False)
    assert _diff.compare(old, old) == []


def test_diff_counts_a_lost_row_as_a_regression(make_report):
    """A requirement that is not checked any more did not get better."""
    new = make_report()
    new["rows"] = new["rows"][1:]
    (change,) = _diff.compare(make_report(), new)
    assert (change.after, change.blocks) == ("absent", True)


def test_report_of_another_wheel_is_refused(make_report, expected):
    """A wheel is known by its bytes, not by its name."""

    report = make_report()
    report["implementation"]["distributions"][0]["wheel_sha256"] = "3" * 64
    report = _resealed(report)
    asked = dataclasses.replace(expected, wheel_sha256="3" * 64)
    assert _verify.problems(report, None, asked) == []
    asked = dataclasses.replace(expected, wheel_sha256="4" * 64)
    assert _verify.problems(report, None, asked) == ["the report is not about this wheel"]


def test_predicate_lists_what_passed_warned_and_failed(make_report):
    """The attestation says the same as the report, in in-toto's words."""
    said = _predicate.predicate(make_report({"CW-001": "fail", "CW-002": "fail"}))
    assert said["result"] == "FAILED"
    assert said["failedTests"] == ["CW-001 ckpt_wrap/test_a.py::test_a [cpu]"]
    assert said["warnedTests"] == ["CW-002 ckpt_wrap/test_a.py::test_b [cpu]"]
    assert _predicate.predicate(make_report())["result"] == "PASSED"
    skipped = _predicate.predicate(make_report({"CW-001": "no_device"}))
    assert len(skipped["failedTests"]) == 1


def test_predicate_is_silent_about_what_is_not_claimed_or_not_provided(make_report):
    """They count neither for nor against; what is provided beside them is listed."""
    lists = ("passedTests", "warnedTests", "failedTests")
    said = _predicate.predicate(make_report({"CW-002": "not_claimed"}))
    assert [len(said[name]) for name in lists] == [1, 0, 0]
    said = _predicate.predicate(make_report({"CW-001": "not_provided", "CW-002": "not_provided"}))
    assert [len(said[name]) for name in lists] == [0, 0, 0]
