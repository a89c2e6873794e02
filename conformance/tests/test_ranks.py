"""The pool of worker processes: results, and recovery from failures."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import pytest
from small_suite import declared

from torchparts_conformance import _ranks, plugin
from torchparts_conformance._errors import RankError

HEAD = """
import os
import time
import torch
import torch.distributed as dist
from torchparts_conformance import requirement

def total(part, rank, world_size, extra):
    value = torch.tensor([rank + extra])
    dist.all_reduce(value)
    return [value.item(), part.answer, world_size, os.getpid()]

def wrong_on_one(part, rank, world_size):
    assert rank == 0, "rank one is wrong"
    dist.barrier()

def dead(part, rank, world_size):
    if rank == 1:
        os._exit(7)
    dist.barrier()

def silent(part, rank, world_size):
    time.sleep(60 * rank)

"""


def _case(id: str, name: str, body: str, *, is_first: bool = True) -> str:
    decorator = declared(id) if is_first else f'@requirement("{id}")'
    return f"{decorator}\ndef test_{name}(part, ranks):\n    {body}\n\n"


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_answer_and_faults_stay_with_their_case(suite):
    good = "got = ranks({n}, total, 1); assert [g[:3] for g in got] == [[{s}, 42, {n}]] * {n}"
    same = "assert ranks(2, total, 0)[0][3] == ranks(2, total, 0)[0][3]"
    cases = [
        HEAD,
        _case("CW-001", "a_two", good.format(n=2, s=3)),
        _case("CW-001", "b_same", same, is_first=False),
        _case("CW-002", "c_wrong", "ranks(2, wrong_on_one)"),
        _case("CW-002", "d_dead", "ranks(2, dead)", is_first=False),
        _case("CW-002", "e_silent", "ranks(2, silent, timeout_s=6)", is_first=False),
        _case("CW-003", "f_again", good.format(n=2, s=3)),
    ]
    suite.write("cases/ckpt_wrap/test_cases.py", "".join(cases))
    suite.run()
    rows = {row["case"].rpartition("test_")[2]: row for row in suite.report()["rows"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "a_two": "pass",
        "b_same": "pass",
        "c_wrong": "fail",
        "d_dead": "error",
        "e_silent": "error",
        "f_again": "pass",
    }
    assert rows["c_wrong"]["reason"] == (
        "rank 1: expected `rank == 0` (rank one is wrong), but `rank` was 1"
    )
    assert "rank 1: the process ended with code 7" in rows["d_dead"]["reason"]
    assert "rank 1: did not answer in time" in rows["e_silent"]["reason"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("ranks(5, total, 1)", "world size must be 1 to 4; got 5"),
        ("ranks(2, lambda *_: 0)", "is a local function, which other processes cannot import"),
    ],
)
def test_misuse_of_ranks_is_an_error_of_the_case(suite, body, said):
    suite.write("cases/ckpt_wrap/test_cases.py", HEAD + _case("CW-001", "misuse", body))
    result = suite.run("--tb=short")
    (row,) = [row for row in suite.report()["rows"] if row["outcome"] != "not_run"]
    assert said in row["reason"]
    assert "in run_on_ranks" not in result.stdout.str()


class Fake:
    """A worker that answers at once, never answers, or is dead."""

    def __init__(self, answer=None, *, ready=True):
        self.answers, self.jobs, self.answer = queue.Queue(), [], answer
        self.is_ready, self.is_alive = ready, True

    def becomes_ready(self, timeout_s):
        return False

    def send(self, job):
        self.jobs.append(job)
        if self.answer is not None:
            self.answers.put({"job": job["job"], **self.answer})

    def printed(self):
        return "what it printed"

    def end(self):
        self.is_alive = False


def _module_level(part, rank, world_size):
    """Not called."""


@pytest.fixture
def pool():
    """`pool(...)` makes a pool of fake workers run a function."""
    made = _ranks.RankPool()

    def run(*workers, timeout_s=5.0):
        made._workers[:] = workers
        subject = SimpleNamespace(spec="ours", mutant=None)
        return made.run(
            subject, "ckpt-wrap", len(workers), _module_level, (1,), timeout_s=timeout_s
        )

    yield run
    made._workers.clear()
    made.close()


def test_every_rank_gets_the_job_and_its_number(pool):
    workers = Fake({"value": "a"}), Fake({"value": "b"})
    assert pool(*workers) == ["a", "b"]
    (first,), (second,) = (worker.jobs for worker in workers)
    assert first | {"rank": 1} == second
    assert all(worker.is_alive for worker in workers)


def test_rank_that_never_answers_ends_the_pool(pool):
    workers = Fake({"value": "a"}), Fake()
    with pytest.raises(RankError, match="rank 1: did not answer in time"):
        pool(*workers, timeout_s=0.05)
    assert not any(worker.is_alive for worker in workers)


def test_error_is_that_of_the_rank_that_had_it(pool, monkeypatch):
    monkeypatch.setattr(_ranks, "GRACE_S", 0.05)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: it broke"):
        pool(Fake(), Fake({"error": "it broke", "trace": ""}), timeout_s=20.0)
    assert time.monotonic() - start < 10


def test_failed_assertion_comes_before_errors_it_brought_about(pool):
    reset = {"error": "connection reset", "trace": ""}
    with pytest.raises(AssertionError, match="rank 1: wrong"):
        pool(Fake(reset), Fake({"error": "wrong", "trace": "", "failed": True}))


def test_worker_that_does_not_start_is_an_error_with_its_output(pool):
    workers = Fake({"value": "a"}), Fake({"value": "b"}, ready=False)
    with pytest.raises(RankError, match="did not start in 120 s: what it printed"):
        pool(*workers)
    assert [worker.jobs for worker in workers] == [[], []]


@pytest.mark.parametrize(
    ("given", "case_limit", "limit_s"),
    [("", "40", 30.0), (", timeout_s=2", "40", 2.0), ("", "1000", plugin.RANK_TIMEOUT_S)],
)
def test_ranks_have_three_quarters_of_the_time_of_a_case(
    suite, monkeypatch, given, case_limit, limit_s
):
    asked = []

    def run(self, *_, timeout_s):
        asked.append(timeout_s)
        return []

    monkeypatch.setattr(_ranks.RankPool, "run", run)
    monkeypatch.setattr(_ranks.RankPool, "start", lambda *_: None)
    suite.write(
        "cases/ckpt_wrap/test_cases.py", HEAD + _case("CW-001", "a", f"ranks(2, total{given})")
    )
    suite.run(f"--case-limit={case_limit}")
    assert asked == [limit_s]
