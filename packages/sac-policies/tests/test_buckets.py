"""DDP's gradient buckets exist before a step and do not count as part of it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.nightly

WORKER = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from sac_policies import fit_


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.first(x)))


def wrapped(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    return DistributedDataParallel(model, **options) if options else model


x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
KINDS = {
    "alone": {},
    "ddp": {"gradient_as_bucket_view": False},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}
for kind, options in KINDS.items():
    for budget in (0.8, 0.6):
        done = fit_(wrapped(**options), x, budget)
        name = f"fit_ {kind} {budget}"
        found[name] = [done.predicted_bytes, done.peak_bytes, done.plain_bytes]
"""


@pytest.mark.parametrize("kind", ["ddp", "views", "static"])
@pytest.mark.parametrize("how", ["fit_ {} 0.8", "fit_ {} 0.6"])
def test_predictions_hold_under_ddp(ranks: list[dict[str, Any]], kind: str, how: str) -> None:
    """As accurate as without DDP; the buckets do not count twice."""
    for rank in ranks:
        predicted, peak, _ = rank[how.format(kind)]
        assert peak == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("kind", ["ddp", "static"])
def test_a_step_under_ddp_takes_what_it_takes_alone(ranks: list[dict[str, Any]], kind: str) -> None:
    """Where the gradients are not views of the buckets."""
    for rank in ranks:
        assert rank[f"fit_ {kind} 0.8"][2] == pytest.approx(rank["fit_ alone 0.8"][2], rel=0.01)
