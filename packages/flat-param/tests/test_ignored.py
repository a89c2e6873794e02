"""What stands in for ignored parameters while others are initialised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flat_param.sharded._ignored import set_aside


def test_stand_ins_are_on_meta_and_gone_after_it_also_after_an_error() -> None:
    """Under each name of a tied one; whatever was put in their place meanwhile goes with them."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = weight = module[0].weight
    index = nn.Parameter(torch.tensor([1]), requires_grad=False)
    module[0].register_parameter("index", index)
    with pytest.raises(RuntimeError, match="stopped"), set_aside(module.modules(), [weight, index]):
        shown = [module[0].weight, module[1].weight, module[0].index]
        assert all(param.is_meta for param in shown)
        assert [tuple(param.shape) for param in shown] == [(2, 2), (2, 2), (1,)]
        assert not module[0].bias.is_meta
        module[0].to_empty(device="cpu", recurse=False)
        raise RuntimeError("stopped")
    assert module[0].weight is module[1].weight is weight
    assert module[0].index is index
