"""A process that is given jobs: what it answers, prints and leaves behind when it is ended."""

from __future__ import annotations

import os
import sys
import textwrap
import time

import pytest

from torchparts_conformance.subject import _worker
from torchparts_conformance.subject._worker import Worker

SERVES = """
import os, sys
from torchparts_conformance.subject._worker import serve

def answer(job):
    print("printed", job)
    os.write(1, b"written")
    return {"got": job, "threads": os.environ["OMP_NUM_THREADS"]}

serve(answer, ready={"pid": os.getpid()})
"""
READY = "print('{}', flush=True)\n"


@pytest.fixture
def started(tmp_path):
    """Give a function that starts a worker with some code; each is ended afterwards."""
    workers = []

    def start(code, **options):
        command = [sys.executable, "-c", textwrap.dedent(code)]
        workers.append(Worker(command, log=tmp_path / f"{len(workers)}.log", **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def test_jobs_are_answered_in_order_once_it_is_ready(started):
    """One answer for each, with nothing between them."""
    worker = started(SERVES)
    assert not worker.is_ready
    assert worker.becomes_ready(60)
    assert worker.is_ready
    for job in ({"n": 1}, {"n": 2}):
        worker.send(job)
    assert [worker.answers.get(timeout=20)["got"] for _ in range(2)] == [{"n": 1}, {"n": 2}]
    assert worker.answers.empty()


def test_what_a_job_prints_is_in_the_log_and_in_no_answer(started):
    """Also what is written to the standard output itself, past Python."""
    worker = started(SERVES)
    assert worker.becomes_ready(60)
    worker.send({})
    assert worker.answers.get(timeout=20)["got"] == {}
    worker.process.stdin.close()
    assert worker.process.wait(20) == 0
    assert "printed {}" in worker.printed()
    assert "written" in worker.printed()


def test_worker_has_one_thread_where_nobody_says_otherwise(started, monkeypatch):
    """Several beside each other, with as many as there are cores, would be slow."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker = started(SERVES)
    assert worker.becomes_ready(60)
    worker.send({})
    assert worker.answers.get(timeout=20)["threads"] == "1"


def test_end_of_the_process_is_an_answer(started):
    """None, so that nobody waits for another one."""
    worker = started(READY)
    assert worker.becomes_ready(20)
    assert worker.answers.get(timeout=20) is None


def test_process_that_ends_before_it_is_ready_is_not(started):
    """What it said is there to be told."""
    worker = started("raise SystemExit('no room')")
    assert not worker.becomes_ready(20)
    assert not worker.is_ready
    assert worker.printed() == "no room\n"


def test_process_that_says_nothing_is_not_ready_in_time(started):
    """The time is kept."""
    worker = started("import time; time.sleep(60)")
    began = time.monotonic()
    assert not worker.becomes_ready(0.2)
    assert time.monotonic() - began < 10


def test_line_that_is_no_answer_ends_the_answers(started):
    """Whoever prints into them is not believed afterwards."""
    worker = started("print('{}'); print('{'); print('{}', flush=True)")
    assert worker.becomes_ready(20)
    assert worker.answers.get(timeout=20) is None
    assert worker.answers.empty()


def test_job_for_a_process_that_is_gone_is_answered_by_none(started):
    """It is found out where an answer is awaited, and raises nothing here."""
    worker = started(READY)
    assert worker.becomes_ready(20)
    worker.process.wait(20)
    assert worker.answers.get(timeout=20) is None
    worker.send({"n": 1})
    assert worker.answers.get(timeout=20) is None


def test_end_of_what_was_printed_is_shown(started):
    """The last characters, where an error says what it is."""
    many = _worker.SHOWN_CHARACTERS
    worker = started(f"import sys; sys.stderr.write('a' * 10 + 'b' * {many})")
    worker.process.wait(20)
    assert worker.printed() == "b" * many


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print('{"child": %d}' % child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
def test_process_that_leads_ends_with_those_that_it_started(started):
    """Nothing of it goes on, and it is gone when `end` returns."""
    worker = started(CHILD, leads=True)
    child = worker.answers.get(timeout=20)["child"]
    worker.end()
    assert worker.process.returncode is not None
    until = time.monotonic() + 20
    while _is_running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_process_that_does_not_lead_stays_in_the_group_of_its_starter(started):
    """So that Ctrl-C reaches it, too."""
    worker = started("import time; time.sleep(60)")
    assert os.getpgid(worker.process.pid) == os.getpgid(0)
