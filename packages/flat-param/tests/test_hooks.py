"""Hooks of parameters, torch's norms and the order of units, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "an_optimizer_in_backward_trains_as_after_it",
    "gradient_hooks_see_whole_gradients_or_are_refused",
    "hooks_are_told_once_of_each_sum",
    "torchs_total_norm_is_of_all_ranks",
    "units_in_another_order_are_named_on_every_rank",
)


@pytest.fixture
def results(ranks: Callable[..., list[Any]]) -> list[dict[str, str]]:
    """All checks of workers/hooks.py, run once on two ranks."""
    return ranks(2, "hooks")


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)
