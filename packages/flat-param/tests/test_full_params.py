"""Whole parameters for a while, and whole state dicts, in a group of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flat_param import MixedPrecision, fully_shard
from flat_param.sharded._full_params import gather_part

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecision(param_dtype=torch.float64)


def test_gathered_tensors_are_of_new_memory_and_of_the_shards_dtype() -> None:
    """Also where one rank's shard is what is whole: writing to them changes no parameter."""
    for options in ({}, {"mixed_precision": PRECISE}):
        layer = fully_shard(nn.Linear(4, 3), **options)
        (part,) = layer._flat_param.parts
        before = layer.weight.detach().clone()
        weight, _ = gather_part(part)
        assert weight.dtype == torch.float32
        assert torch.equal(weight, before)
        weight.zero_()
        assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("write_back", [False, True])
def test_what_is_written_stays_only_where_asked(write_back: bool) -> None:
    """And the optimizer's parameters are back afterwards."""
    layer = fully_shard(nn.Linear(4, 3), mixed_precision=PRECISE)
    param, before = layer.weight, layer.weight.detach().clone()
    with layer.whole_params(write_back=write_back), torch.no_grad():
        assert layer.weight is not param
        layer.weight.mul_(2)
    assert layer.weight is param
    assert torch.equal(param, 2 * before if write_back else before)
