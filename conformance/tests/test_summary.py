"""What a run says at its end: once, in order, and with what to do next."""

from __future__ import annotations

from torchparts_conformance.render import _summary

WHERE = "case ckpt_wrap/test_a.py:7 > adapter adapters/mine.py:3"


def test_each_failure_is_told_once_with_its_sentence_and_a_next_step(make_report, registry):
    """Requirement, sentence, what was seen, where, and what to do."""
    report = make_report({"CW-001": "fail"}, reason="AssertionError: 41 == 42", where=WHERE)
    lines = _summary.summary(report, registry)
    assert lines[:6] == [
        "CW-001 MUST core, cpu: fail",
        "  It MUST.",
        "  seen   AssertionError: 41 == 42",
        f"  at     {WHERE}",
        "  next   torchparts-conformance run --impl mine:adapter --explain CW-001",
        "",
    ]
    assert lines[-1] == "mine: not conformant"
    assert "\n".join(lines).count("AssertionError: 41 == 42") == 1


def test_failures_with_one_reason_are_told_together(make_report, registry):
    """What breaks everything is said once, with the ids it breaks."""
    report = make_report({"CW-001": "error", "CW-002": "error"}, reason="IndexError: no", where="")
    lines = _summary.summary(report, registry)
    assert lines[0] == "CW-001 MUST core, cpu: error"
    assert "  also   CW-002" in lines
    assert "\n".join(lines).count("IndexError") == 1


def test_error_of_the_adapter_says_which_line_to_mend(make_report, registry):
    """A fault of the adapter is told apart from one below it."""
    report = make_report({"CW-001": "error"}, reason="NameError: x", where=WHERE)
    mend = "  next   mend adapters/mine.py:3, or say in `lacks` what is not there"
    assert mend in _summary.summary(report, registry)
    below = make_report({"CW-001": "error"}, where=f"{WHERE} > theirs/core.py:9")
    assert "--explain CW-001" in "\n".join(_summary.summary(below, registry))


def test_what_was_left_out_is_a_line_and_the_page_is_one(make_report, registry, tmp_path):
    """What is not claimed or not provided is no failure, and no list."""
    report = make_report({"CW-001": "not_provided"}, reason="there is no x")
    lines = _summary.summary(report, registry, tmp_path / "matrix.html")
    assert f"page: {tmp_path / 'matrix.html'}" in lines
    assert lines[0] == "ckpt-wrap     robust             cpu   conformant      MUST 0/0  SHOULD 1/1"
    assert "not provided: ckpt-wrap core" in lines
    assert _summary.summary(make_report({"CW-001": "not_run"}), registry)[0].startswith(
        "not run: 1"
    )


def test_what_is_not_claimed_is_named_by_profile_and_what_is_not_provided_by_group():
    """Of an area of which something is judged; else the area alone."""
    words = ("area", "profile", "group", "verdict")
    verdicts = [
        ("ckpt-wrap", "core", "wrapping", "conformant"),
        ("ckpt-wrap", "core", "applying", "not provided"),
        ("ckpt-wrap", "robust", "applying", "not provided"),
        ("ckpt-wrap", "plan", "", "not claimed"),
        ("flat-param", "core", "", "not provided"),
    ]
    report = {"verdicts": [dict(zip(words, v, strict=True)) for v in verdicts]}
    assert list(_summary._left_out(report)) == [
        "not claimed: ckpt-wrap plan",
        "not provided: ckpt-wrap applying; flat-param",
    ]


def test_verdict_counts_what_kept_it_from_passing(make_report, registry):
    """Behind the numbers that passed."""
    report = make_report({"CW-001": "fail"})
    (line,) = (
        line for line in _summary.summary(report, registry) if line.startswith("ckpt-wrap     core")
    )
    assert line.endswith("not conformant  MUST 0/1  (1 fail)")


def test_many_reasons_are_shortened_but_none_is_lost(make_report, registry, monkeypatch):
    """Below the first twenty each is one line."""
    monkeypatch.setattr(_summary, "TOLD_IN_FULL", 0)
    report = make_report({"CW-001": "fail"}, reason="AssertionError: 41")
    assert _summary.summary(report, registry)[0] == "CW-001 fail: AssertionError: 41"


def test_explain_says_what_is_known_of_a_requirement(registry):
    """Sentence, profile, reason and cases, before they run."""
    lines = _summary.explained(registry["CW-001"], [("ckpt_wrap/test_a.py::test_a", "It works.")])
    assert lines == [
        "CW-001: It MUST.",
        "  profile  ckpt-wrap core",
        "  why      a reason",
        "  case     ckpt_wrap/test_a.py::test_a: It works.",
    ]


def test_nothing_is_shown_where_nothing_was_seen():
    """As of an announced failure that passes."""
    row = {"id": "CW-001", "level": "MUST", "profile": "core", "group": "", "device": "cpu"}
    row |= {"outcome": "xpass", "reason": "", "where": ""}
    lines = list(_summary._failure([row], {}, "mine", set()))
    assert lines[0] == "CW-001 MUST core, cpu: xpass"
    assert [line for line in lines if line.startswith("  seen")] == []


def test_announced_failure_that_passes_is_told_once(make_report, registry):
    """As a row, with its next step; other problems and notes have their lines."""
    report = make_report({"CW-001": "xpass"})
    expired = "known failure CW-002 on cpu: expired on 2020-01-01"
    report["problems"] = ["known failure CW-001 on cpu: did not fail (pass)", expired]
    lines = _summary.summary(report, registry, notes=["note: soon"])
    assert [line for line in lines if "CW-001" in line] == ["CW-001 MUST core, cpu: xpass"]
    assert lines.index(expired) + 1 == lines.index("note: soon")
