"""Levels of compiled regions, and of regions that offload."""

from __future__ import annotations

from torch import nn

from sac_policies.budget._levels import (
    COSTLY,
    HIDDEN_AWAY,
    INPUTS_AWAY,
    KEEPS,
    LEVELS,
    MATMULS,
    RECOMPUTES,
    Candidate,
)
from sac_policies.policies import Decision, save_by_index
from sac_policies.policies._rules import RECOMPUTE_ALL


def test_compiled_regions_take_tags_or_keep_everything():
    """All compiled regions on a level share one policy; they offload nothing."""
    region = Candidate("block", nn.Linear(2, 2), is_compiled=True, is_taggable=True)
    found = [region.at(level) for level in range(len(LEVELS))]
    assert [each.level for each in found] == [*LEVELS[: RECOMPUTES + 1], *2 * [LEVELS[RECOMPUTES]]]
    assert found[MATMULS].policy is COSTLY
    assert all(each.policy is RECOMPUTE_ALL for each in found[RECOMPUTES:])
    untagged = Candidate("block", nn.Linear(2, 2), is_compiled=True)
    assert {untagged.at(level).level for level in range(len(LEVELS))} == {LEVELS[KEEPS]}


def test_values_that_hide_are_offloaded_beside_inputs():
    """A plan names the calls; a block without one offloads only its inputs."""
    plan = save_by_index({("aten.mm.default", 1): Decision.OFFLOAD})
    with_plan = Candidate("block", nn.Linear(2, 2), hidden=plan)
    without = Candidate("block", nn.Linear(2, 2))
    inputs = without.at(INPUTS_AWAY).policy
    assert without.at(HIDDEN_AWAY).policy == with_plan.at(INPUTS_AWAY).policy == inputs
    assert with_plan.at(HIDDEN_AWAY).policy == inputs | plan
