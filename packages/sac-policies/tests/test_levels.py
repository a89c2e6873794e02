"""What a region does on each level goes by what ran in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies.budget._levels import (
    AGAIN,
    HIDDEN_AWAY,
    INPUTS_AWAY,
    KEEPS,
    LEVELS,
    OPERATORS,
    Region,
)
from sac_policies.policies import Decision, save_by_index

MM = (torch.ops.aten.mm.default,)


@pytest.mark.parametrize(
    ("operators", "wrote", "done"),
    [
        (MM, (), LEVELS),
        (MM, ("mean",), LEVELS),
        (MM, None, (*LEVELS[:AGAIN], OPERATORS, *LEVELS[INPUTS_AWAY:])),
        ((), (), (LEVELS[KEEPS], OPERATORS, *LEVELS[AGAIN:])),
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


def test_values_that_hide_are_offloaded_beside_inputs():
    """A plan names their calls; a block without one offloads its inputs alone."""
    plan = save_by_index({("aten.mm.default", 1): Decision.OFFLOAD})
    with_plan = Region("block", nn.Linear(2, 2), MM, (), rewrites=False, hidden=plan)
    without = Region("block", nn.Linear(2, 2), MM, (), rewrites=False)
    inputs = without.at(INPUTS_AWAY).policy
    assert without.at(HIDDEN_AWAY).policy == with_plan.at(INPUTS_AWAY).policy == inputs
    assert with_plan.at(HIDDEN_AWAY).policy == inputs | plan
