"""Hooks of parameters, torch's norms and the order of units, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "an_optimizer_in_backward_trains_as_after_it",
    "gradient_hooks_see_whole_gradients_or_are_refused",
    "hooks_are_told_once_of_each_sum",
    "torchs_total_norm_is_of_all_ranks",
    "units_in_another_order_are_named_on_every_rank",
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(ranks: Callable[..., list[Any]], claim: str) -> None:
    """Each `check_<claim>` of workers/hooks.py passes on both ranks."""
    for rank, result in enumerate(ranks(2, "hooks")):
        assert not result[claim], f"rank {rank}: {result[claim]}"


def test_every_check_is_listed(ranks: Callable[..., list[Any]]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(ranks(2, "hooks")[0]) == sorted(CLAIMS)
