"""Of what the process of a stranger's code says and prints, only what has the word counts."""

from __future__ import annotations

import sys
import textwrap

import pytest

from torchparts_conformance.commands import _runs
from torchparts_conformance.judging import _judge
from torchparts_conformance.judging._judge import Ended


def _judging(code, **environment):
    with pytest.MonkeyPatch.context() as patch:
        for word, value in environment.items():
            patch.setenv(word, value)
        return _judge.watch([sys.executable, "-c", textwrap.dedent(code)])


def test_what_is_told_without_the_word_is_strange():
    """Only what has the word counts, and nothing does after the report."""
    ended = _judge.watch(
        [sys.executable, "-c", TELLER], "secret", {"word": "secret", "options": []}
    )
    assert [phase["case"] for phase in ended.phases] == ["a"]
    assert (ended.report, ended.replaced, ended.strange) == ("text", ["x"], 3)


TELLER = """
import json
word = json.loads(input())["word"]
def tell(**told):
    print(json.dumps({"replaced": [], **told}))
tell(word=word, case="a", device="cpu", outcome="pass")
tell(word="guessed", case="b", device="cpu", outcome="pass")
print("no JSON")
tell(word=word, report="text", replaced=["x"])
tell(word=word, report="another")
"""


def test_flood_of_output_is_not_passed_on(capfd):
    """Whatever is printed, a complaint of pytest is found, and nothing else is shown."""
    ended = _judging("""
        import os, sys
        os.write(1, b"o" * 3_000_000)
        os.write(2, b"e" * 3_000_000)
        sys.stderr.write("\\nERROR: implementation 'x' is unknown\\n")
        sys.exit(4)
    """)
    assert ended.status == 4
    assert ended.complaint == "implementation 'x' is unknown"
    assert capfd.readouterr() == ("", "")


def test_process_that_says_it_was_refused_without_a_word_is_lost(tmp_path, capsys):
    """Exit code 4 needs a complaint; a process that only ends so did not run the suite."""
    ended = _judging("import os; os._exit(4)")
    assert _runs._verdict(tmp_path, ended) == 1
    said = capsys.readouterr().err
    assert "the run ended without a report and with status 4, but every run writes one" in said
    assert said.count("\n") == 1


def test_progress_is_shown_sparsely(capfd):
    """Of a long run, every twentieth case and the end are shown; failures are told at the end."""
    _judging("""
        import sys
        for i in range(1, 42):
            print(f"[{i:>2}/41] ckpt-wrap {i}/41" + ", 1 wrong" * (i > 6), file=sys.stderr)
    """)
    numbers = [line.split("/")[0].strip("[ ") for line in capfd.readouterr().err.splitlines()]
    assert numbers == ["20", "40", "41"]


def test_environment_brings_no_plugins():
    """Neither an installed plugin nor options from the environment can change an outcome."""
    words = "sorted(w for w in os.environ if 'PYTEST' in w or 'AUTOLOAD' in w)"
    code = f"import os, sys; sys.stderr.write(str({words}))"
    ended = _judging(code, PYTEST_ADDOPTS="-k nothing", PYTEST_PLUGINS="theirs")
    assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in ended.last_line
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in ended.last_line
    assert "PYTEST_ADDOPTS" not in ended.last_line
    assert "PYTEST_PLUGINS" not in ended.last_line


def test_code_that_swallows_every_interruption_is_ended():
    """Where raising in a case does not help, the process is ended."""
    ended = _judging("""
        import time
        from torchparts_conformance.run._time_limit import time_limit
        with time_limit(0.2):
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    continue
    """)
    assert ended.status == 1
    assert "File" in ended.last_line


def _row(outcome, case="a", device="cpu"):
    return {"case": case, "device": device, "outcome": outcome}


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("pass", ["pass"]),
        ("pass", ["pass", "pass"]),
        ("xpass", ["pass"]),
        ("xfail", ["fail"]),
        ("fail", []),
        ("error", ["pass"]),
        ("not_run", []),
    ],
)
def test_row_that_agrees_with_what_was_told_contradicts_nothing(outcome, told):
    """Only what would be good for the implementation has to have been told."""
    ended = Ended(phases=[_row(each) for each in told])
    assert _judge.contradictions({"rows": [_row(outcome)], "problems": []}, ended) == []


@pytest.mark.parametrize(
    ("outcome", "told", "was"),
    [
        ("pass", [], "not run"),
        ("pass", ["error", "pass"], "error/pass"),
        ("xpass", ["fail"], "fail"),
        ("xfail", ["error"], "error"),
        ("xfail", ["pass"], "pass"),
    ],
)
def test_row_that_is_better_than_what_was_told_contradicts_it(outcome, told, was):
    """A crash that was announced, or a failure that a later phase hides, above all."""
    ended = Ended(phases=[_row(each) for each in told])
    found = _judge.contradictions({"rows": [_row(outcome)], "problems": []}, ended)
    assert found == [f"a cpu is {outcome}, but was {was}"]


def test_case_on_another_device_says_nothing_of_this_one():
    """Nor does another case."""
    ended = Ended(phases=[_row("pass", device="cuda"), _row("pass", case="b")])
    found = _judge.contradictions({"rows": [_row("pass")], "problems": []}, ended)
    assert found == ["a cpu is pass, but was not run"]


def test_what_was_replaced_has_to_be_said():
    """Where the report says it, it is no contradiction."""
    ended = Ended(replaced=["torch.equal", "math.isclose"])
    report = {"rows": [], "problems": ["torch.equal was replaced by the code under test"]}
    assert _judge.contradictions(report, ended) == ["math.isclose was replaced unsaid"]
