"""Ranks agree: one plan, the largest peak, an error on all where they differ."""

from __future__ import annotations

from typing import Any

import pytest

from sac_policies._agree import check_equal, from_first_rank, largest, world_size

WORKER = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from sac_policies import BudgetError, fit
from sac_policies._agree import check_equal, from_first_rank, largest

torch.set_num_threads(1)
rank, size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
found = fit(model, torch.ones(128 * (rank + 1), 16), 0.95)
found_all = {"digest": found.policy.digest, "peak": found.peak_bytes, "fits": bool(found)}
try:
    layers = list(model) if rank == 0 else list(model)[:3]
    fit(nn.Sequential(*layers), torch.ones(128, 16), 0.8)
except BudgetError as error:
    found_all["error"] = str(error)
found_all["largest"] = largest(rank)
found_all["first"] = from_first_rank(f"rank {rank}")
open(out, "w").write(json.dumps(found_all))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found, by rank."""
    found: list[dict[str, Any]] = run_ranks(WORKER, tmp_path_factory.mktemp("agree"))
    return found


@pytest.mark.dist
def test_ranks_fit_one_plan_to_the_largest_peak(ranks: list[dict[str, Any]]) -> None:
    """Other batch sizes, other times: still one plan, and the larger peak is the one reported."""
    assert ranks[0]["fits"]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert ranks[0]["peak"] == ranks[1]["peak"]


@pytest.mark.dist
def test_ranks_with_other_operators_raise_together(ranks: list[dict[str, Any]]) -> None:
    """No rank waits for the others: each gets the same error."""
    assert "trace digests" in ranks[0]["error"]
    assert ranks[0]["error"] == ranks[1]["error"]


@pytest.mark.dist
def test_values_are_exchanged(ranks: list[dict[str, Any]]) -> None:
    """The largest of all, the one of rank 0."""
    assert [rank["largest"] for rank in ranks] == [1, 1]
    assert [rank["first"] for rank in ranks] == ["rank 0", "rank 0"]


def test_one_process_agrees_with_itself() -> None:
    """Without a process group nothing is called."""
    assert world_size() == 1
    assert largest(3) == 3
    assert from_first_rank("plan") == "plan"
    check_equal("digest", what="trace")
