"""Modules called past their unit, and copies that differ, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import holds_on_every_rank

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "copies_in_another_order_are_named",
    "errors_of_whole_modules_are_their_own",
    "layer_unused_by_one_copy_gets_the_mean_with_zero",
    "module_called_past_its_unit_is_named",
)


@pytest.fixture
def results(ranks: Callable[..., list[Any]]) -> list[dict[str, str]]:
    """All checks of workers/four_ranks.py, run once on four ranks."""
    return ranks(4, "four_ranks")


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
