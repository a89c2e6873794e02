"""Compiled and sharded in either order: the same losses, no recompilation, counted breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "compiling_a_sharded_module",
    "compiling_sharded_blocks_in_place",
    "sharding_blocks_compiled_in_place",
    "sharding_compiled_blocks",
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(ranks: Callable[..., list[Any]], claim: str) -> None:
    """Each `check_<claim>` of workers/compiled.py passes on both ranks."""
    for rank, result in enumerate(ranks(2, "compiled", timeout_s=300)):
        assert not result[claim], f"rank {rank}: {result[claim]}"


def test_every_check_is_listed(ranks: Callable[..., list[Any]]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(ranks(2, "compiled", timeout_s=300)[0]) == sorted(CLAIMS)
