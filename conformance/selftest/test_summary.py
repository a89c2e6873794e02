"""What a run says while it goes on and at its end: once, in order, and with what to do next."""

from __future__ import annotations

import pytest

from torchparts_conformance.commands import _cli
from torchparts_conformance.render import _summary
from torchparts_conformance.run import _place, _progress
from torchparts_conformance.run._case_result import CaseResult

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


def test_progress_counts_areas_and_tells_the_time_left(registry, capsys, monkeypatch):
    """Ten of twelve cases run; what is only left out takes no time and is not waited for."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    entries = [CaseResult(f"c{n}", "cpu", (registry["CW-001"],), "pass") for n in range(12)]
    entries[5].outcome = "error"
    progress = _progress.Progress(is_told=True)
    progress.begins((entry, n >= 2) for n, entry in enumerate(entries))
    for n, entry in enumerate(entries[:8]):
        now[0] += 30.0 * (n >= 2)
        progress.ended(entry, ran=n >= 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[ 1/12] ckpt-wrap 1/12"
    assert lines[5] == "[ 6/12] ckpt-wrap 6/12, 1 wrong"
    assert lines[7] == "[ 8/12] ckpt-wrap 8/12, 1 wrong, about 2 min left"
    assert _progress.show(lines[7])
    assert not _progress.show("something a case printed [1/2]")


def _raise_in(path, depth):
    """Raise below `depth` calls that seem to be in a file."""
    code = compile("def f(g, n):\n    g(f, n)\n", str(path), "exec")
    space = {}
    exec(code, space)

    def down(f, n):
        if n == 0:
            raise ValueError("here")
        f(down, n - 1)

    try:
        space["f"](down, depth)
    except ValueError as error:
        return error


def test_place_names_the_line_of_the_case_and_of_the_adapter(tmp_path):
    """By the last folders, so that no folder of the machine is told."""
    case, adapter = tmp_path / "cases" / "ckpt_wrap" / "test_a.py", tmp_path / "mine.py"
    adapter.write_text('parts = {\n    "ckpt-wrap": 1,\n}\n')
    raised = _raise_in(case, 1)
    told = _place.place_of(raised, adapter, "ckpt-wrap", failed=True)
    assert told == f"adapter {tmp_path.name}/mine.py:2 > case ckpt_wrap/test_a.py:2"
    told = _place.place_of(raised, adapter, "ckpt-wrap", failed=False)
    assert told.startswith(f"adapter {tmp_path.name}/mine.py:2 > case ckpt_wrap/test_a.py:2 > ")
    assert told.rpartition(" > ")[2].startswith("selftest/test_summary.py:")
    assert (
        _place.place_of(_raise_in(tmp_path / "else.py", 1), adapter, "ckpt-wrap", failed=True) == ""
    )


def test_place_is_in_the_report(suite):
    """Of a failure, and of nothing that passed."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    suite.freeze()
    suite.run()
    places = {row["id"]: row["where"] for row in suite.report()["rows"]}
    line = cases.read_text().splitlines().index("    assert part.answer == 41") + 1
    # The adapter names the area in its sixth line.
    folder = suite.root.name
    assert (
        places["CW-001"] == f"adapter {folder}/adapter.py:6 > case ckpt_wrap/test_cases.py:{line}"
    )
    assert places["CW-002"] == ""


def test_one_requirement_can_be_run_alone(suite):
    """Its cases run, its outcome is shown and decides, and nothing is said of the others."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    suite.freeze()
    good = suite.run("--requirement", "CW-002")
    assert good.ret == 0
    good.stdout.fnmatch_lines(["pass * ckpt_wrap/test_cases.py::test_two cpu: -"])
    bad = suite.run("--requirement", "CW-001")
    assert bad.ret == 1
    bad.stdout.fnmatch_lines(["fail * ckpt_wrap/test_cases.py::test_one cpu: AssertionError*"])
    assert "CW-003" not in bad.stdout.str()


def test_explain_says_what_is_known_of_a_requirement(registry):
    """Sentence, profile, reason and cases, before they run."""
    lines = _summary.explained(registry["CW-001"], [("ckpt_wrap/test_a.py::test_a", "It works.")])
    assert lines == [
        "CW-001: It MUST.",
        "  profile  ckpt-wrap core",
        "  why      a reason",
        "  case     ckpt_wrap/test_a.py::test_a: It works.",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--explain", "CW-19"], "--explain 'CW-19' is unknown, but a requirement is named by its"),
        (["--explain", "speed"], "--explain 'SPEED' is unknown"),
        (["--area", "wheels"], "--area 'wheels' is unknown"),
        (["--device", "tpu"], "--device 'tpu' is unknown"),
        (["--profile", "speed"], "--profile 'speed' is unknown"),
        (["--case-limit", "0"], "--case-limit 0 asked for"),
    ],
)
def test_mistake_in_an_option_is_not_hidden_by_a_missing_one(options, said, capsys, monkeypatch):
    """No implementation is given, but the mistake is what is told."""
    monkeypatch.delenv("TORCHPARTS_IMPL", raising=False)
    assert _cli.main(["run", *options]) == 4
    assert said in capsys.readouterr().err
