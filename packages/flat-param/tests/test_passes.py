"""Passes that are stopped end as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("world", "stride"), [(2, 23), pytest.param(1, 1, marks=pytest.mark.nightly)]
)
def test_step_by_hand_stopped_on_all_ranks_leaves_nothing(
    ranks: Callable[..., list[Any]], world: int, stride: int
) -> None:
    """Ranks that are stopped at the same place go on; tests/stress stops other steps."""
    for result in ranks(world, "interrupted", stride, timeout_s=300):
        assert result["places"] > 50
        assert result["wrong"] == []
