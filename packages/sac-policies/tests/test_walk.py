"""What is held for replays besides what autograd saves is walked through, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sac_policies import BudgetPlan, profile_step, solve
from sac_policies.budget._solve import spread

from .test_watched_step import measured

ROWS, WIDTH = 64, 256


class Shifted(nn.Module):
    """Layers with sums that forget what was added: half as large as they are, in each forward.

    A second one is for all layers, and a third is small.
    """

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("steps", torch.linspace(0.0, 1.0, ROWS * WIDTH).view(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for_all, small = self.steps * 0.5, self.steps[0] * 0.1
        for at, layer in enumerate(self.layers):
            y = layer(x).view(2, ROWS, WIDTH)
            y = torch.tanh(y + (self.steps + at).cos())
            y = F.silu(y + for_all) + small
            x = y.view(2 * ROWS, WIDTH).sin()
        return x.sum()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_constants_are_predicted(share: float) -> None:
    """Within a hundredth, whatever is kept; they are over a tenth of it."""
    model, x = Shifted(), torch.randn(2 * ROWS, WIDTH)
    step = profile_step(model, x)
    held = sum(each.storage_bytes for each in step.trace.constants)
    assert held > step.trace.total_bytes() // 10
    low, high = step.trace.fixed_bytes(), step.trace.total_bytes()
    plans = [
        solve(step.trace, low + int(share * (high - low))),
        spread(step.trace, 2 + int(share * 8)),
    ]
    for plan in plans:
        assert isinstance(plan, BudgetPlan)
        assert step.peak_bytes(plan) == pytest.approx(measured(model, x, plan), rel=0.01)
