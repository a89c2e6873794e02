"""Ranks with different modules or settings all say so, before anything travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

CLAIMS = (
    "agreeing_ranks_are_not_counted",
    "another_dtype_is_named",
    "another_nesting_is_named",
    "another_order_is_named",
    "another_setting_is_named",
    "another_shape_is_named",
    "another_mesh_is_named",
    "another_stride_is_named",
    "another_tie_is_named",
    "frozen_on_one_rank_is_named",
    "missing_parameter_is_named",
    "mistake_of_one_rank_is_an_error_on_all",
    "surplus_parameter_is_named",
)


@pytest.fixture
def results(ranks: Callable[..., list[Any]]) -> list[dict[str, str]]:
    """All checks of workers/agreement.py, run once on two ranks."""
    return ranks(2, "agreement")


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)
