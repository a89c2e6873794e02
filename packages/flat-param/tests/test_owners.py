"""Who moves a parameter's values, found from the parameter."""

import gc

import pytest
import torch
from torch import nn

from flat_param import ParameterError, flat_params_of, flatten, fully_shard, unflatten
from flat_param.handle import FlatParamHandle


def pair():
    """Two layers that share a weight, and their parent."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return first, second, nn.Sequential(first, second)


@pytest.mark.parametrize("move", [flatten, fully_shard])
def test_parameter_tied_to_a_flattened_module_beside_is_refused(move, group_of_one):
    """Once that is unflattened, the parent of both is flattened or sharded."""
    first, second, parent = pair()
    flatten(first)
    with pytest.raises(ParameterError) as caught:
        move(second)
    assert type(second) is nn.Linear
    assert str(caught.value) == (
        f"flat_param.{move.__name__}: parameter 'weight' is tied to 'weight' in a flattened module "
        "beside this module, but tied parameters are moved together. Flatten or shard their common "
        "parent."
    )
    unflatten(first)
    move(parent)


def test_deleted_flattened_module_refuses_nothing():
    """Its parameters may be flattened with another module."""
    first, second, parent = pair()
    flatten(first)
    del first, parent
    gc.collect()
    flatten(second)


SHARDED = "'0.weight' is sharded by fully_shard, .* only whole parameters can be flattened"
FLAT = "weight' lies in the buffer of a flattened module, .* Call flat_param.unflatten"


def two_layers():
    """A module with two modules inside, and its parameters' values."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("unit", ["module", "inside"])
def test_flatten_refuses_a_sharded_module(group_of_one, unit):
    """Nothing changes, and the module trains."""
    model, before = two_layers()
    fully_shard(model if unit == "module" else model[0])
    with pytest.raises(ParameterError, match=rf"flat_param.flatten: parameter {SHARDED}"):
        flatten(model)
    assert all(map(torch.equal, model.parameters(), before))
    model(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_flatten_refuses_unsharded_parameters(group_of_one):
    """What `unshard` shows; nothing is moved."""
    model, before = two_layers()
    fully_shard(model).unshard()
    with pytest.raises(ParameterError, match="is sharded by fully_shard"):
        flatten(model)
    model.reshard()
    assert all(map(torch.equal, model.parameters(), before))


def test_flatten_takes_what_a_unit_ignores(group_of_one):
    """These parameters are left to their user."""
    model, _ = two_layers()
    fully_shard(model, ignored_params=list(model[0].parameters()))
    assert flatten(model[0]).numel == 20


def test_sharded_parameters_in_a_flattened_module_are_refused(group_of_one):
    """At the next use, which would have made pieces views of the buffer."""
    model, _ = two_layers()
    flat = flatten(model)
    model[0] = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ParameterError, match=f"FlatParams: parameter {SHARDED}"):
        flat.as_vector()
    model, _ = two_layers()
    fully_shard(model, ignored_params=list(model[1].parameters()))
    flat = flatten(model[1])
    model[1].weight = model[0].weight
    with pytest.raises(ParameterError, match="'weight' is sharded by fully_shard"):
        flat.as_vector()


@pytest.mark.parametrize("flat", ["module", "inside", "around"])
def test_fully_shard_refuses_a_flattened_module(group_of_one, flat):
    """`unflatten` first, and it is sharded."""
    model, _ = two_layers()
    flattened = model[0] if flat == "inside" else model
    flatten(flattened)
    target = model[0] if flat == "around" else model
    with pytest.raises(ParameterError, match=rf"fully_shard: parameter '.*{FLAT}"):
        fully_shard(target)
    unflatten(flattened)
    fully_shard(target)


def test_flat_param_handle_refuses_parameters_of_others(group_of_one):
    """Of a unit and of a flattened module."""
    for make, said in ((fully_shard, SHARDED), (flatten, FLAT)):
        model, _ = two_layers()
        make(model)
        with pytest.raises(ParameterError, match=said):
            FlatParamHandle(list(model.parameters()), model)


def _pair():
    """Two layers beside each other, each flattened."""
    root = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("left", "right")})
    for module in root.values():
        flatten(module)
    return root


@pytest.mark.parametrize("name", ["weight", "extra"])
def test_weight_that_is_tied_to_one_beside_later_is_refused(name):
    """By the flat view, and by a step over its chunks."""
    root = _pair()
    flat = flat_params_of(root["right"])
    optimizer = torch.optim.SGD(flat.chunks(), lr=0.1)
    root["right"].register_parameter(name, root["left"].weight)
    for use in (flat.norm, optimizer.step):
        with pytest.raises(ParameterError, match=r"FlatParams: parameter '\w+' is tied to"):
            use()
