"""Ranks agree on levels and the largest peak; where they differ, all raise an error."""

from __future__ import annotations

from typing import Any

import pytest

WORKER = """
from torch import nn
from sac_policies import BudgetError, fit_
from sac_policies.budget._agree import check_equal, from_first_rank, largest

torch.manual_seed(0)
model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 64) for _ in range(4)))
best = fit_(model, torch.ones(32 * (rank + 1), 4, 16), 0.8)
found |= {"levels": [each.level for each in best.regions], "peak": best.peak_bytes}
found |= {"predicted": best.predicted_bytes, "steps": len(best.rounds), "fits": bool(best)}
best.undo()
try:
    layers = list(model) if rank == 0 else list(model)[:3]
    fit_(nn.Sequential(*layers), torch.ones(32, 4, 16), 0.8)
except BudgetError as error:
    found["error"] = str(error)
found["largest"] = largest(rank)
found["first"] = from_first_rank(f"rank {rank}")
current = torch.accelerator.current_accelerator
torch.accelerator.current_accelerator = lambda **_: torch.device("meta")
found["beside an accelerator"] = largest(rank)
torch.accelerator.current_accelerator = current
"""


@pytest.mark.dist
def test_ranks_choose_the_same_levels_for_the_largest_peak(ranks: list[dict[str, Any]]) -> None:
    """Batches and times differ, but levels do not, and the larger peak is reported."""
    assert ranks[0]["fits"]
    assert ranks[0]["levels"] == ranks[1]["levels"]
    assert ranks[0]["peak"] == ranks[1]["peak"]


@pytest.mark.dist
def test_ranks_predict_the_largest_peak(ranks: list[dict[str, Any]]) -> None:
    """Ranks have different batches; all predict the largest peak, so few steps confirm it."""
    assert ranks[0]["predicted"] == ranks[1]["predicted"]
    assert ranks[0]["predicted"] == pytest.approx(ranks[0]["peak"], rel=0.01)
    assert ranks[0]["steps"] <= 8


@pytest.mark.dist
def test_ranks_with_other_blocks_raise_together(ranks: list[dict[str, Any]]) -> None:
    """No rank waits for the others: each gets the same error."""
    assert "block digests" in ranks[0]["error"]
    assert ranks[0]["error"] == ranks[1]["error"]


@pytest.mark.dist
def test_values_are_exchanged(ranks: list[dict[str, Any]]) -> None:
    """The maximum over all ranks, and the value of rank 0."""
    assert [rank["largest"] for rank in ranks] == [1, 1]
    assert [rank["first"] for rank in ranks] == ["rank 0", "rank 0"]


@pytest.mark.dist
def test_gloo_exchanges_on_the_cpu(ranks: list[dict[str, Any]]) -> None:
    """A gloo group of CPUs exchanges on the CPU even if the machine has an accelerator."""
    assert [rank["beside an accelerator"] for rank in ranks] == [1, 1]
