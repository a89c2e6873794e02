"""A process of the pool of ranks: what a case does there is answered, and nothing of it is left."""

from __future__ import annotations

import pytest

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
    suite.freeze()
    assert suite.run(impl="cunning:impl").ret == 1
    (row,) = suite.report()["rows"]
    assert row["outcome"] == "error"
    assert "torch.equal was replaced by the code under test" in row["reason"]


ON_A_RANK = """
from torchparts_conformance import requirement

def answer(part, rank, world_size):
    return part.answer

@requirement("CW-001")
def test_one(part, ranks):
    assert ranks(1, answer) == [42]
"""
