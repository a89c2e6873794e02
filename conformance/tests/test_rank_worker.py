"""A process of the pool of ranks: whatever a case does there is an answer."""

from __future__ import annotations

import sys

import pytest
import torch
from small_suite import declared

from torchparts_conformance.subject import _rank_worker
from torchparts_conformance.subject._ranks import shared_pool


@pytest.fixture
def own_ranks():
    """Give the case worker processes that nobody used before, and nobody uses afterwards."""
    shared_pool().stop()
    yield
    shared_pool().stop()


def test_replacing_what_judges_on_a_rank_is_an_error(suite, own_ranks):
    """What is replaced only where a case runs on ranks is seen there."""
    suite.write(
        "cunning.py",
        """
        import torch
        import torch.distributed as dist
        from torchparts_conformance import Implementation

        class Part:
            @property
            def answer(self):
                if dist.is_initialized():
                    torch.equal = lambda *args: True
                return 42

        impl = Implementation("cunning", "1", parts={"ckpt-wrap": Part()})
        """,
    )
    suite.write("cases/ckpt_wrap/test_cases.py", ON_A_RANK)
    assert suite.run(impl="cunning:impl").ret == 1
    (row,) = suite.report()["rows"]
    assert row["outcome"] == "error"
    assert "torch.equal was replaced by the code under test" in row["reason"]


ON_A_RANK = f"""
from torchparts_conformance import requirement

def answer(part, rank, world_size):
    return part.answer

{declared("CW-001")}
def test_one(part, ranks):
    assert ranks(1, answer) == [42]
"""


def test_function_of_a_case_is_found_by_its_module_or_else_by_its_file(tmp_path):
    """A case that is in no package is imported from where it lies, and once."""
    path = tmp_path / "case_in_no_package.py"
    path.write_text("made = []\ndef answer():\n    made.append(1)\n    return len(made)\n")
    try:
        assert _rank_worker._function("case_in_no_package", str(path), "answer")() == 1
        assert _rank_worker._function("case_in_no_package", "elsewhere.py", "answer")() == 2
    finally:
        sys.modules.pop("case_in_no_package", None)
    assert _rank_worker._function("json", "elsewhere.py", "dumps")([1]) == "[1]"


@pytest.fixture
def job(tmp_path):
    """Give a job for one rank, of a function that does something."""

    def make(body):
        name = f"job_of_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(f"def f(part, rank, world_size):\n    {body}\n")
        return {
            "job": 5,
            "impl": "ours",
            "mutant": None,
            "area": "mod-tracker",
            "rank": 0,
            "world_size": 1,
            "args": [],
            "timeout_s": 20,
            "path": list(sys.path),
            "module": name,
            "file": str(tmp_path / f"{name}.py"),
            "function": "f",
            "store": str(tmp_path / "store"),
        }

    yield make
    sys.modules.pop(f"job_of_{tmp_path.name}", None)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("return (rank, world_size)", {"value": [0, 1]}),
        ("assert part is None, 'no'", {"failed": True, "lacks": False}),
        ("raise SystemExit(3)", {"error": "SystemExit: 3", "failed": False, "lacks": False}),
        ("return object()", {"failed": False, "lacks": False}),
        (
            "from torchparts_conformance import NotProvided; raise NotProvided('no')",
            {"error": "NotProvided: no", "failed": False, "lacks": True},
        ),
    ],
)
def test_whatever_a_case_does_on_a_rank_is_an_answer(job, body, answer):
    """With the job's number, and the process is as it was before."""
    got = _rank_worker._answer(job(body), {}, list)
    assert got["job"] == 5
    assert answer.items() <= got.items()
    assert ("trace" in got) is ("value" not in answer)
    assert not torch.distributed.is_initialized()


@pytest.mark.dist
def test_answer_of_a_rank_where_the_judge_was_replaced_does_not_count(job):
    """Though the function gave one."""
    got = _rank_worker._answer(job("return 1"), {}, lambda: ["torch.equal"])
    assert got["error"] == "RankError: torch.equal was replaced by the code under test"
    assert "value" not in got
