"""Passes end as a whole, stopped or not, and free nothing too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["forward", "backward", "accumulation", "between", "by_hand"])
def test_step_stopped_anywhere_leaves_nothing(ranks: Callable[..., list[Any]], phase: str) -> None:
    """Every entry and return of a function is tried; the next gradients are the plain module's."""
    (result,) = ranks(1, "interrupted", phase, 1, timeout_s=300)
    assert result["places"] > 50
    assert result["wrong"] == []


@pytest.mark.parametrize("phase", ["forward", "backward", "accumulation", "by_hand"])
def test_step_stopped_on_all_ranks_leaves_nothing(
    ranks: Callable[..., list[Any]], phase: str
) -> None:
    """Two ranks that are stopped at the same place go on as if nothing had been."""
    for result in ranks(2, "interrupted", phase, 53, timeout_s=300):
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
