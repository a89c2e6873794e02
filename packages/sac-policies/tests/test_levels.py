"""What a region does on each level goes by what ran in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies.budget._levels import LEVELS, Region

MM = (torch.ops.aten.mm.default,)


@pytest.mark.parametrize(
    ("operators", "wrote", "done"),
    [
        (MM, (), LEVELS),
        (MM, ("mean",), LEVELS),
        (MM, None, (*LEVELS[:3], "recomputes everything", "offloads matmuls")),
        ((), (), (LEVELS[0], *2 * ["recomputes everything"], *2 * ["runs again"])),
    ],
)
def test_a_level_that_a_region_cannot_have_is_another(operators, wrote, done):
    """Without costly operators nothing of them is kept, and what replaces buffers runs once."""
    region = Region("block", nn.Linear(2, 2), operators, wrote, rewrites=False)
    found = [region.at(level) for level in range(len(LEVELS))]
    assert [each.level for each in found] == list(done)
    assert [each.policy is None for each in found] == [
        each.level in ("keeps everything", "runs again") for each in found
    ]
