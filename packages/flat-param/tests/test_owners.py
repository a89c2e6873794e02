"""Who moves a parameter's values, found from the parameter."""

import gc
import weakref

import pytest
from torch import nn

from flat_param import ParameterError
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
