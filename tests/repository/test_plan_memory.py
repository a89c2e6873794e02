"""Predictions of `plan_memory.py` equal the counted bytes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

HERE = Path(__file__).parents[2] / "docs/examples"


class Small(nn.Module):
    """Four equal blocks and a loss."""

    def __init__(self) -> None:
        """Build the blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("plan_memory")


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
def test_what_is_predicted_from_two_blocks_is_counted_for_all(
    plan: ModuleType, tmp_path: Path
) -> None:
    """Exact for each way and number of blocks; gradients equal the plain model's."""
    model, batch = Small(), {"x": torch.randn(32, 16)}
    choices = list(plan.predict(model, batch, "blocks", str(tmp_path)))
    on_one = [choice for choice in choices if choice.ranks == 1]
    assert len(on_one) == 1 + 3 * 4
    for row in plan.measure(model, batch, "blocks", on_one, 1):
        assert row["measured_kept_bytes"] == row["kept_bytes"]
        assert row["equal"]


def test_first_choice_that_fits_is_recommended(plan: ModuleType) -> None:
    """Choices are ordered by cost; if nothing fits, nothing is recommended."""
    small = plan.Choice("checkpoint", 1, 1, 10, 50)
    choices = [replace(small, total_bytes=80), small, replace(small, blocks=2, total_bytes=20)]
    assert plan.recommend(choices, 60) is small
    assert plan.recommend(choices, 10) is None
