"""A handle's checks, and the places of its parameters."""

import pytest
import torch
from torch import nn

from flat_param import FlatParamHandle, ParameterError
from flat_param.drop_in._flat_parameter import ShardParamInfo
from flat_param.drop_in._handle_places import shard_part


def test_foreign_parameters_are_listed_by_position_and_shape(mlp):
    """The error names each that the module does not own, and leaves the module as it was."""
    before = list(mlp.parameters())
    foreign = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ParameterError) as caught:
        FlatParamHandle([*before, foreign, nn.Parameter(torch.ones(()))], mlp)
    assert str(caught.value) == (
        "flat_param.FlatParamHandle: `params` were not found in `module`'s tree: "
        "params[4] (2, 3), params[5] (), but Sequential must own all of them. "
        "Leave foreign parameters out."
    )
    assert all(a is b for a, b in zip(mlp.parameters(), before, strict=True))


def test_a_part_says_where_it_lies_in_both():
    """Offset in the shard, elements, first and last element in the parameter."""
    for start in range(12):
        for end in range(start, 12):
            held = [at for at in range(3, 8) if start <= at <= end]
            part = shard_part(3, 7, start, end)
            if not held:
                assert part == ShardParamInfo(False, None, None, None, None)
            else:
                assert part == ShardParamInfo(
                    True, held[0] - start, len(held), held[0] - 3, held[-1] - 3
                )
