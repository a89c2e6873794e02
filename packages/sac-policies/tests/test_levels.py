"""A region's levels depend on the operators that ran in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies.budget._levels import (
    AGAIN,
    COSTLY,
    HIDDEN_AWAY,
    INPUTS_AWAY,
    KEEPS,
    LEVELS,
    MATMULS,
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
    """Without costly operators no matmul is kept; a region that replaces buffers runs once."""
    region = Region("block", nn.Linear(2, 2), operators, wrote, rewrites=False)
    found = [region.at(level) for level in range(len(LEVELS))]
    assert [each.level for each in found] == list(done)
    assert [each.policy is None for each in found] == [
        each.level in ("keeps everything", "runs again") for each in found
    ]


@pytest.mark.parametrize(
    ("wrote", "rewrites", "is_taggable", "done"),
    [
        ((), False, True, (KEEPS, MATMULS, AGAIN)),
        ((), False, False, (KEEPS, KEEPS, AGAIN)),
        (("mean",), False, True, (KEEPS, KEEPS, AGAIN)),
        ((), True, True, (KEEPS, KEEPS, KEEPS)),
        (None, False, True, (KEEPS, KEEPS, KEEPS)),
    ],
)
def test_compiled_regions_keep_everything_where_they_cannot_do_less(
    wrote, rewrites, is_taggable, done
):
    """All compiled regions that keep matmuls share one policy."""
    region = Region("block", nn.Linear(2, 2), MM, wrote, rewrites, True, is_taggable)
    found = [region.at(level) for level in range(AGAIN + 1)]
    assert [each.level for each in found] == [LEVELS[level] for level in done]
    assert [each.policy for each in found] == [COSTLY if n == MATMULS else None for n in done]


def test_values_that_hide_are_offloaded_beside_inputs():
    """A plan names the calls; a block without one offloads only its inputs."""
    plan = save_by_index({("aten.mm.default", 1): Decision.OFFLOAD})
    with_plan = Region("block", nn.Linear(2, 2), MM, (), rewrites=False, hidden=plan)
    without = Region("block", nn.Linear(2, 2), MM, (), rewrites=False)
    inputs = without.at(INPUTS_AWAY).policy
    assert without.at(HIDDEN_AWAY).policy == with_plan.at(INPUTS_AWAY).policy == inputs
    assert with_plan.at(HIDDEN_AWAY).policy == inputs | plan
