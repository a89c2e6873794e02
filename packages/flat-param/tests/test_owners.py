"""Who moves a parameter's values, found from the parameter."""

import gc
import weakref

import pytest
import torch
from torch import nn

from flat_param import ParameterError, flatten, fully_shard, unflatten
from flat_param.handle import FlatParamHandle
from flat_param.memory._owners import FLATTENED, UNIT, Owner, _owners, check_owners


@pytest.fixture
def pair():
    """Two layers that share a weight, and their parent."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return first, second, nn.ModuleList([first, second])


@pytest.mark.parametrize("kind", [FLATTENED, UNIT])
def test_a_parameter_moved_beside_is_refused_with_both_names(pair, kind):
    """The error names the caller, both parameters, what moves the other, and a next step."""
    first, second, _ = pair
    owner = Owner(kind, first, [("theirs", first.weight)])
    with pytest.raises(ParameterError) as caught:
        check_owners("fully_shard", second, [("ours", second.weight)], (FLATTENED, UNIT))
    assert str(caught.value) == (
        f"flat_param.fully_shard: parameter 'ours' is tied to 'theirs' in {kind} beside this "
        "module, but tied parameters are moved together. Flatten or shard their common parent."
    )
    assert owner.kind == kind


@pytest.mark.parametrize("kind", [FLATTENED, UNIT])
def test_an_owner_counts_for_as_long_as_it_is_kept(pair, kind):
    """Dropped, it refuses nothing."""
    first, second, _ = pair
    owner = Owner(kind, first, first.named_parameters())
    del owner
    gc.collect()
    check_owners("flatten", second, second.named_parameters(), (kind,))


@pytest.mark.parametrize("kinds", [(), (FLATTENED,)])
def test_only_the_kinds_asked_for_are_refused(pair, kinds):
    """A unit beside is no concern of a caller that asks for flattened modules alone."""
    first, second, _ = pair
    owner = Owner(UNIT, first, first.named_parameters())
    check_owners("flatten", second, second.named_parameters(), kinds)
    assert owner.name_of(first.weight) == "weight"


@pytest.mark.parametrize("around", ["same", "parent", "child"])
def test_an_owner_inside_or_around_is_not_beside(pair, around):
    """The module itself, what holds it and what it holds may move its parameters."""
    first, _, parent = pair
    inner, outer = {"same": (first,) * 2, "parent": (first, parent), "child": (parent, first)}[
        around
    ]
    owner = Owner(UNIT, inner, inner.named_parameters())
    assert not owner.is_beside(outer)
    check_owners("fully_shard", outer, outer.named_parameters(), (UNIT,))


def test_an_owner_whose_module_is_gone_refuses_nothing(pair):
    """It keeps its module no more than it keeps the parameters alive."""
    first, second, parent = pair
    owner = Owner(UNIT, first, first.named_parameters())
    del first, parent, pair
    second.extra = nn.Linear(1, 1)
    owner._module = weakref.ref(nn.Linear(1, 1))  # dropped at once
    assert not owner.is_beside(second)
    check_owners("fully_shard", second, second.named_parameters(), (UNIT,))


def test_neither_module_nor_parameters_are_kept_alive():
    """An owner that outlives them holds no memory of theirs."""
    layer = nn.Linear(2, 2)
    owner = Owner(FLATTENED, layer, layer.named_parameters())
    seen = [weakref.ref(layer), weakref.ref(layer.weight)]
    del layer
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert not owner.is_beside(nn.Linear(1, 1))


def test_a_parameter_at_the_address_of_one_that_is_gone_is_another(pair):
    """It has the `id` by chance; nobody moves it, and a check lets it pass."""
    first, second, _ = pair
    owner = Owner(UNIT, first, [("gone", first.weight)])
    stranger = nn.Parameter(first.weight.detach().clone())
    owner._params[id(stranger)] = owner._params[id(first.weight)]
    _owners[UNIT][id(stranger)] = owner
    assert owner.name_of(stranger) is None
    check_owners("fully_shard", second, [("new", stranger)], (UNIT,))


def test_the_latest_owner_is_the_one_that_counts(pair):
    """An older one that is dropped later does not take the newer one's parameters with it."""
    first, second, _ = pair
    older = Owner(UNIT, first, [("older", first.weight)])
    newer = Owner(UNIT, first, [("newer", first.weight)])
    del older
    gc.collect()
    with pytest.raises(ParameterError, match="'newer'"):
        check_owners("fully_shard", second, second.named_parameters(), (UNIT,))
    assert newer.name_of(first.weight) == "newer"


def test_a_check_looks_at_every_parameter(pair):
    """The one that is tied may be the last of them."""
    first, second, _ = pair
    second.bias = first.bias
    owner = Owner(UNIT, first, [("bias", first.bias)])
    with pytest.raises(ParameterError, match="parameter 'bias' is tied to 'bias' in a unit"):
        check_owners("fully_shard", second, second.named_parameters(), (UNIT,))
    del owner


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


def test_flatten_refuses_a_module_inside_a_unit(group_of_one):
    """Its parameters are the unit's."""
    model, _ = two_layers()
    fully_shard(model)
    with pytest.raises(ParameterError, match="'weight' is sharded by fully_shard"):
        flatten(model[0])


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


def test_sharded_module_put_into_a_flattened_one_is_refused(group_of_one):
    """At the next forward, which would have made its pieces views of the buffer."""
    model, _ = two_layers()
    flatten(model)
    model[0] = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ParameterError, match=f"FlatParams: parameter {SHARDED}"):
        model(torch.ones(1, 4))


def test_sharded_parameter_assigned_to_a_flattened_module_is_refused(group_of_one):
    """Also if the unit that it belongs to is around the flattened module."""
    model, _ = two_layers()
    fully_shard(model, ignored_params=list(model[1].parameters()))
    flatten(model[1])
    with pytest.raises(ParameterError, match="'weight' is sharded by fully_shard"):
        model[1].weight = model[0].weight


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
