"""Functions on several ranks: results, and recovery from failures."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from small_suite import declared

from torchparts_conformance import plugin
from torchparts_conformance._errors import RankError
from torchparts_conformance.ranks import Ranks, Run

pytestmark = pytest.mark.dist


def total(rank, world_size, extra):
    value = torch.tensor([rank + extra])
    dist.all_reduce(value)
    return [value.item(), world_size, os.getpid(), torch.get_num_threads()]


def wrong_on_one(rank, world_size):
    assert rank == 0, "rank one is wrong"
    dist.barrier()


def raises_on_all(rank, world_size):
    raise KeyError("broken")


def exits(rank, world_size):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def is_killed(rank, world_size):
    if rank == 1:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        return type(error).__name__


def silent(rank, world_size):
    time.sleep(60 * rank)


def variables(rank, world_size):
    return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]


@pytest.fixture(scope="module")
def ranks():
    made = Ranks()
    yield made
    made.close()


def test_results_come_by_rank_from_new_processes(ranks):
    first, again = (ranks(2, total, 1) for _ in range(2))
    assert [(sum_, world, threads) for sum_, world, _, threads in first] == [(3, 2, 1)] * 2
    assert len({pid for _, _, pid, _ in (*first, *again)}) == 4
    assert ranks(3, f"{__file__}::total", 0)[2][:2] == [3, 3]


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (wrong_on_one, AssertionError, "^rank 1: .*rank one is wrong"),
        (raises_on_all, RankError, "^rank 0: KeyError: 'broken'"),
        (exits, RankError, "^rank 1: the process ended with code 7"),
        (is_killed, RankError, "^rank 1: the process ended with code -9\nabout to die"),
        (silent, RankError, "^rank 1: did not answer in time"),
    ],
)
def test_error_names_the_rank_that_caused_it(ranks, function, kind, said):
    with pytest.raises(kind, match=said):
        ranks(2, function, timeout_s=2.0)
    assert ranks(1, total, 0)[0][0] == 0


def test_killed_rank_has_no_result_if_expected(ranks):
    assert ranks(2, is_killed, killed=(1,)) == ["RuntimeError", None]
    with pytest.raises(RankError, match="rank 0: did not end by SIGKILL"):
        ranks(1, total, 0, killed=(0,))


def test_runs_go_on_at_the_same_time(ranks):
    began = time.monotonic()
    runs = [Run(silent, 1), Run(total, 2, (5,)), Run(total, 1, (7,))]
    results = ranks.results_of(runs)
    assert [found[0][0] if found[0] else None for found in results] == [None, 11, 7]
    assert time.monotonic() - began < 60


def test_ranks_have_the_variables_of_torchrun(ranks):
    assert ranks(2, variables)[1] == ["1", "1", "2", "127.0.0.1"]


HEAD = """
import torch
import torch.distributed as dist
from torchparts_conformance import requirement

def total(part, rank, world_size, extra):
    value = torch.tensor([rank + extra])
    dist.all_reduce(value)
    return [value.item(), part.answer, world_size]

def wrong_on_one(part, rank, world_size):
    assert rank == 0, "rank one is wrong"

def fails(part, rank, world_size):
    raise KeyError("broken")

"""


def _case(id: str, name: str, body: str) -> str:
    return f"{declared(id)}\ndef test_{name}(part, ranks):\n    {body}\n\n"


def test_cases_run_functions_with_their_part_on_ranks(suite):
    cases = [
        HEAD,
        _case("CW-001", "right", "assert ranks(2, total, 1) == [[3, 42, 2]] * 2"),
        _case("CW-002", "wrong", "ranks(2, wrong_on_one)"),
        _case("CW-003", "fails", "ranks(2, fails)"),
    ]
    suite.write("cases/ckpt_wrap/test_cases.py", "".join(cases))
    suite.run()
    rows = {row["case"].rpartition("test_")[2]: row for row in suite.report()["rows"]}
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {"right": "pass", "wrong": "fail", "fails": "error"}
    assert rows["wrong"]["reason"] == (
        "rank 1: expected `rank == 0` (rank one is wrong), but `rank` was 1"
    )


def test_local_function_is_an_error_of_the_case(suite):
    body = "ranks(2, lambda *_: 0)"
    suite.write("cases/ckpt_wrap/test_cases.py", HEAD + _case("CW-001", "misuse", body))
    result = suite.run("--tb=short")
    (row,) = [row for row in suite.report()["rows"] if row["outcome"] != "not_run"]
    assert "is a local function, which other processes cannot import" in row["reason"]
    assert "in run_on_ranks" not in result.stdout.str()


@pytest.mark.parametrize(
    ("given", "case_limit", "limit_s"),
    [("", "40", 30.0), (", timeout_s=2", "40", 2.0), ("", "1000", plugin.RANK_TIMEOUT_S)],
)
def test_ranks_have_three_quarters_of_the_time_of_a_case(
    suite, monkeypatch, given, case_limit, limit_s
):
    asked = []
    monkeypatch.setattr(Ranks, "__call__", lambda *_, timeout_s: asked.append(timeout_s))
    monkeypatch.setattr(Ranks, "start", lambda _: None)
    suite.write(
        "cases/ckpt_wrap/test_cases.py", HEAD + _case("CW-001", "a", f"ranks(2, total{given})")
    )
    suite.run(f"--case-limit={case_limit}")
    assert asked == [limit_s]


def test_interrupted_run_ends_its_processes(ranks, monkeypatch):
    ranks(1, total, 0)
    server = ranks._server

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(server.answers, "get", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks(1, silent)
    assert server.process.returncode == -signal.SIGKILL
    assert ranks._server is None
