"""Passes end as a whole, stopped or not, and free nothing too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("world", "phase", "stride"),
    [
        (2, "forward", 53),
        (2, "backward", 53),
        (2, "accumulation", 53),
        (2, "by_hand", 53),
        pytest.param(1, "by_hand", 1, marks=pytest.mark.nightly),
    ],
)
def test_step_stopped_on_all_ranks_leaves_nothing(
    ranks: Callable[..., list[Any]], world: int, phase: str, stride: int
) -> None:
    """Ranks that are stopped at the same place go on; tests/stress tries every place of a step."""
    for result in ranks(world, "interrupted", phase, stride, timeout_s=300):
        assert result["places"] > 50
        assert result["wrong"] == []


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["ZeRO-3", "ZeRO-2"])
def test_frozen_weights_stay_while_anything_leads_through_them(
    ranks: Callable[..., list[Any]], way: str
) -> None:
    """Frozen, tied and nested layers in every mixture have the plain module's gradients."""
    for result in ranks(2, "layouts", way, timeout_s=300):
        assert result["tried"] == 280
        assert result["wrong"] == []
