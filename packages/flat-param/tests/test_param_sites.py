"""Places where parameters are registered follow what is put there, or refuse it by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from flat_param import MixedPrecision, ParameterError, fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecision(param_dtype=torch.float64)


def _layer() -> nn.Module:
    return fully_shard(nn.Linear(4, 3), mixed_precision=PRECISE)


def test_registry_has_parameters_outside_and_leaves_inside() -> None:
    """Both are made once: the same objects in every step."""
    layer = _layer()
    (part,) = layer._flat_param.parts
    param, leaf = layer.weight, part.leaves[0]
    inside = []
    layer.register_forward_pre_hook(lambda module, _: inside.append(module.weight))
    for _ in range(2):
        layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert layer.weight is param
    assert all(each is leaf for each in inside)
    assert len(inside) == 2


@pytest.mark.parametrize("value", [None, torch.ones(3, 5), torch.ones(12), torch.ones(())])
def test_value_of_another_shape_is_refused_by_name(value: torch.Tensor | None) -> None:
    """Also one that has as many elements, and none at all; the old one is back afterwards."""
    layer = _layer()
    param, before = layer.weight, layer.weight.detach().clone()
    layer.weight = None if value is None else nn.Parameter(value)
    shape = None if value is None else tuple(value.shape)
    text = (
        f"flat_param.fully_shard: parameter 'weight' was re-assigned with shape {shape}, but it "
        "was sharded with shape (3, 4). Assign a whole parameter of the same shape, or shard the "
        "module again."
    )
    with pytest.raises(ParameterError, match=re.escape(text)):
        layer(torch.ones(2, 4, dtype=torch.float64))
    assert layer.weight is param
    assert torch.equal(param, before)
