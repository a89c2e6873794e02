"""Cases in child processes, which an implementation may crash."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from torchparts_conformance import _cli, _process, _time_limit

KILLER = """
import os
import types
from torchparts_conformance import Implementation

class Answer:
    def __eq__(self, other):
        {body}

impl = Implementation("it", "1", parts={{"ckpt-wrap": types.SimpleNamespace(answer=Answer())}})
"""


@pytest.fixture
def run(suite, monkeypatch):
    """`run(...)` runs the small suite by its command line; returns the exit code."""
    # Child processes use the suite's own path of cases; replace it by the small suite's.
    suite.write("cases/pytest.ini", "[pytest]\n")
    sitecustomize = "import torchparts_conformance.requirements._cases as c, pathlib\n"
    sitecustomize += f"c.CASES = pathlib.Path({str(suite.root / 'cases')!r})\n"
    suite.write("sitecustomize.py", sitecustomize)
    path = os.pathsep.join([str(suite.root), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.chdir(suite.root)

    def run(*options, impl="adapter:good"):
        where = ["--impl", impl, "--area", "ckpt-wrap", "--out", str(suite.root / "out")]
        return _cli.main(["run", *where, *options])

    return run


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.nightly), "2"])
def test_processes_share_the_cases_and_give_one_report(run, suite, capsys, jobs):
    suite.write(
        "cases/conftest.py",
        "import os\ndef pytest_runtest_call(item):\n"
        "    with open(f'ran-{os.getpid()}', 'a') as file:\n        file.write(item.name + ' ')\n",
    )
    assert run("--jobs", jobs) == 0
    ran = [name for path in suite.root.glob("ran-*") for name in path.read_text().split()]
    assert sorted(ran) == ["test_one[cpu]", "test_three[cpu]", "test_two[cpu]"]
    assert suite.outcomes() == {"CW-001": "pass", "CW-002": "pass", "CW-003": "pass"}
    said = capsys.readouterr()
    assert "good: conformant" in said.out
    assert "[3/3]" in said.err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os._exit(7)", "without a report and with status 7 during ckpt_wrap/test_cases.py::"),
        pytest.param(
            *("os.kill(os.getpid(), 9)", "without a report and by signal 9 during"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_implementation_that_ends_the_process_fails_the_run(run, suite, capsys, body, said):
    suite.write("killer.py", KILLER.format(body=body))
    (suite.root / "out").mkdir()
    (suite.root / "out/badge-ckpt-wrap.svg").write_text("of an earlier run")
    (suite.root / "out/badge-of-honour.svg").write_text("the user's")
    assert run(impl="killer:impl") == 1
    assert said in capsys.readouterr().err
    assert [path.name for path in (suite.root / "out").iterdir()] == ["badge-of-honour.svg"]


WITH_RANKS = """
from torchparts_conformance import requirement

def rank_of(part, rank, world_size):
    return rank

@requirement("CW-001", "It MUST.", source="test_fqn")
def test_ranks(part, ranks):
    assert ranks(2, rank_of) == [0, 1]
"""


def test_run_with_ranks_leaves_no_files(run, suite, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    suite.write("cases/ckpt_wrap/test_cases.py", WITH_RANKS)
    assert run("--jobs", "1") == 0
    assert [path.name for path in tmp_path.glob("torchparts-*")] == []


def test_bad_adapter_is_one_line_and_exit_code_4(run, capsys):
    assert run(impl="nobody_has:this") == 4
    said = capsys.readouterr().err.strip()
    assert "importing 'nobody_has:this' raised ModuleNotFoundError" in said
    assert "\n" not in said


def test_known_failures_are_applied_to_the_whole(run, suite, capsys):
    suite.write_cases(one="assert part.answer == 41")
    lines = ['id = "CW-001"', 'devices = ["cpu"]', 'reason = "x"', 'issue = "https://x.org"']
    known = "\n".join(["[[known_failure]]", *lines, "expires = 2999-01-01"])
    suite.write("known.toml", known)
    assert run("--known-failures", "known.toml") == 0
    assert suite.outcomes()["CW-001"] == "xfail"
    assert "good: announced failures" in capsys.readouterr().out


class Interrupted:
    """A worker whose first message is interrupted, and which then sends others."""

    def __init__(self, *messages):
        self.answers, self.messages = self, [KeyboardInterrupt(), *messages]

    def get(self, timeout):
        if not self.messages:
            raise queue.Empty
        if isinstance(message := self.messages.pop(0), KeyboardInterrupt):
            raise message
        return message


def test_interrupted_run_waits_for_its_processes(monkeypatch):
    last = {"code": 2, "report": {}}
    worker = Interrupted({"total": 2}, {"start": "one"}, last)
    assert _process._Followed([worker]).answers() == [last]
    monkeypatch.setattr(_process, "FINISHING_S", 0.1)
    silent = Interrupted({"start": "one"})
    assert _process._Followed([silent]).answers() == [{"case": "one"}]


@pytest.mark.parametrize(("limit_s", "end_s"), [(0.5, 1.5), (5.0, 6.0), (100.0, 120.0)])
def test_process_is_ended_a_fifth_after_the_limit(monkeypatch, limit_s, end_s):
    asked = []
    later = lambda seconds, **options: asked.append((seconds, options["exit"]))  # noqa: E731
    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    with _time_limit.time_limit(limit_s):
        pass
    assert asked == [(pytest.approx(end_s), True)]


def test_block_is_interrupted_and_the_alarm_is_put_back():
    before = signal.getsignal(signal.SIGALRM)
    too_long = pytest.raises(_time_limit.OutOfTime, match=r"took more than 0\.05 s")
    with too_long, _time_limit.time_limit(0.05):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass
    assert signal.getsignal(signal.SIGALRM) is before


def test_other_thread_is_not_interrupted():
    done, before = [], signal.getsignal(signal.SIGALRM)

    def run():
        with _time_limit.time_limit(60.0):
            done.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [before]


def test_variables_of_pytest_do_not_reach_the_cases(monkeypatch):
    from torchparts_conformance._worker import environment

    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    code = "import os; print('PYTEST_ADDOPTS' in os.environ, os.environ['OMP_NUM_THREADS'])"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert ended.stdout == "False 1\n"
