"""Sharding over one axis of a mesh what tensor parallel cuts over the other, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "gathers_by_hand_show_dtensors",
    "optimizers_of_replaced_parameters_are_refused",
    "states_are_the_parallel_modules",
    "training_is_that_of_one_process",
    "what_cannot_be_cut_twice_is_refused",
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(ranks: Callable[..., list[Any]], claim: str) -> None:
    """Each `check_<claim>` of workers/tensor_parallel.py passes on all ranks."""
    for rank, result in enumerate(ranks(4, "tensor_parallel")):
        assert not result[claim], f"rank {rank}: {result[claim]}"


def test_every_check_is_listed(ranks: Callable[..., list[Any]]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(ranks(4, "tensor_parallel")[0]) == sorted(CLAIMS)
