"""The pool of worker processes: what it returns, and what it survives."""

from __future__ import annotations

import pytest

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


def _case(id: str, name: str, body: str) -> str:
    return f'@requirement("{id}")\ndef test_{name}(part, ranks):\n    {body}\n\n'


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_answer_and_faults_stay_with_their_case(suite):
    """A wrong, a dead and a silent rank fail their own cases; processes are used again."""
    good = "got = ranks({n}, total, 1); assert [g[:3] for g in got] == [[{s}, 42, {n}]] * {n}"
    cases = [
        HEAD,
        _case("CW-001", "a_two", good.format(n=2, s=3)),
        _case("CW-001", "b_same", "assert ranks(2, total, 0)[0][3] == ranks(2, total, 0)[0][3]"),
        _case("CW-002", "c_wrong", "ranks(2, wrong_on_one)"),
        _case("CW-002", "d_dead", "ranks(2, dead)"),
        _case("CW-002", "e_silent", "ranks(2, silent, timeout_s=2)"),
        _case("CW-003", "f_again", good.format(n=2, s=3)),
    ]
    suite.write("cases/ckpt_wrap/test_cases.py", "".join(cases))
    suite.freeze()
    suite.run()
    found = {row["case"][-7:]: row for row in suite.report()["rows"]}
    reasons = {row["case"].rpartition("test_")[2]: row["reason"] for row in found.values()}
    outcomes = {
        row["case"].rpartition("test_")[2]: row["outcome"] for row in suite.report()["rows"]
    }
    assert outcomes == {
        "a_two": "pass",
        "b_same": "pass",
        "c_wrong": "fail",
        "d_dead": "error",
        "e_silent": "error",
        "f_again": "pass",
    }
    assert "rank 1: AssertionError: rank one is wrong" in reasons["c_wrong"]
    assert "rank 1: the process ended with code 7" in reasons["d_dead"]
    assert "rank 1: did not answer in time" in reasons["e_silent"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("ranks(5, total, 1)", "world size 5 asked for, but the pool has 1 to 4"),
        ("ranks(2, lambda *_: 0)", "is a local function, but other processes import it"),
    ],
)
def test_misuse_of_ranks_names_the_rule(suite, body, said):
    """A case that asks for what cannot be done is told so."""
    suite.write("cases/ckpt_wrap/test_cases.py", HEAD + _case("CW-001", "misuse", body))
    suite.freeze()
    suite.run()
    (row,) = [row for row in suite.report()["rows"] if row["outcome"] != "not_run"]
    assert said in row["reason"]
