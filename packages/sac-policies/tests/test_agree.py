"""Ranks agree on one plan and the largest peak; where they differ, all raise an error."""

from __future__ import annotations

from typing import Any

import pytest

from sac_policies.budget._agree import check_equal, from_first_rank, largest

WORKER = """
from torch import nn
from sac_policies import BudgetError, plan_region
from sac_policies.budget._agree import check_equal, from_first_rank, largest

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
best = plan_region(model, torch.ones(128 * (rank + 1), 16), 0.95)
found |= {"digest": best.policy.digest, "peak": best.peak_bytes, "fits": bool(best)}
found |= {"predicted": best.predicted_bytes, "steps": len(best.rounds)}
try:
    layers = list(model) if rank == 0 else list(model)[:3]
    plan_region(nn.Sequential(*layers), torch.ones(128, 16), 0.8)
except BudgetError as error:
    found["error"] = str(error)
found["largest"] = largest(rank)
found["first"] = from_first_rank(f"rank {rank}")
torch.accelerator.current_accelerator = lambda **_: torch.device("meta")
found["beside an accelerator"] = largest(rank)
"""


@pytest.mark.dist
def test_ranks_fit_one_plan_to_the_largest_peak(ranks: list[dict[str, Any]]) -> None:
    """Batch sizes and times differ, yet there is one plan, and the larger peak is reported."""
    assert ranks[0]["fits"]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert ranks[0]["peak"] == ranks[1]["peak"]


@pytest.mark.dist
def test_ranks_predict_the_largest_peak(ranks: list[dict[str, Any]]) -> None:
    """Ranks have different batches; all predict the largest peak, so few steps confirm it."""
    assert ranks[0]["predicted"] == ranks[1]["predicted"]
    assert ranks[0]["predicted"] == pytest.approx(ranks[0]["peak"], rel=0.01)
    assert ranks[0]["steps"] <= 3


@pytest.mark.dist
def test_ranks_with_other_operators_raise_together(ranks: list[dict[str, Any]]) -> None:
    """No rank waits for the others: each gets the same error."""
    assert "trace digests" in ranks[0]["error"]
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


def test_one_process_agrees_with_itself() -> None:
    """Without a process group, no collective is called."""
    assert largest(3) == 3
    assert from_first_rank("plan") == "plan"
    check_equal("digest", what="trace")
