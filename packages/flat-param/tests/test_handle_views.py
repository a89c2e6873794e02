"""What a handle puts in the place of a module's parameters, and takes in from there."""

import pytest
import torch
from torch import nn

from flat_param import HandleShardingStrategy as Strategy
from flat_param import ParameterError


def test_unflatten_as_params_is_a_parenthesis(mlp, handle_of):
    """Inside there are parameters, outside there are tensors."""
    handle = handle_of(mlp)
    with handle.unflatten_as_params():
        assert [name for name, _ in mlp.named_parameters()] == list(handle.flat_param._fqns)
    assert list(mlp.named_parameters()) == []


def test_tied_places_are_listed(handle_of):
    """Names of first and further places."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    handle = handle_of(model)
    assert list(handle.param_module_names()) == [("weight", "0"), ("weight", "1")]
    assert list(handle.shared_param_module_names()) == [("weight", "1")]
    assert model[1].weight is model[0].weight
    assert repr(handle) == "FlatParamHandle(flat_param.fqns=('0.weight',))"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("by", ["data", "object"])
def test_replaced_original_parameters_are_taken_in(mlp, world_size, by, handle_of):
    """A value put in a parameter's place between steps is there when the module is whole again."""
    strategy = Strategy.NO_SHARD if world_size == 1 else Strategy.FULL_SHARD
    handle = handle_of(
        mlp, sharding_strategy=strategy, use_orig_params=True, rank=0, world=world_size
    )
    handle.shard()
    handle.init_flat_param_attributes()
    held = mlp[0].weight
    value = torch.full_like(held, 2.0)
    if by == "data":
        held.data = value
    else:
        mlp[0].weight = nn.Parameter(value)
    assert handle._writeback_orig_params()
    assert not handle._writeback_orig_params()
    assert torch.equal(handle.flat_param[: value.numel()], value.flatten())
    handle.flat_param.data.mul_(2)
    assert torch.equal(mlp[0].weight, 2 * value)


def test_a_replaced_parameter_of_another_shape_is_refused(mlp, handle_of):
    """In the source's words, and with its name; the flat parameter keeps its values."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    before = handle.flat_param.detach().clone()
    mlp[0].weight = nn.Parameter(torch.ones(2))
    with pytest.raises(
        ParameterError, match=r"Cannot writeback when the parameter shape changes\n.*0\.weight"
    ):
        handle.unshard()
    assert torch.equal(handle.flat_param, before)
