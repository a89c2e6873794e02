"""Places where parameters are registered follow what is put there, or refuse it by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import ParameterError, StateError, fully_shard
from flat_param.sharded._param_sites import ParamSite, ParamSites
from flat_param.sharded._sharded_params import ShardedParams

PRECISE = MixedPrecisionPolicy(param_dtype=torch.float64)
Make = Callable[..., list[ShardedParams]]


def _sites(part: ShardedParams, *indices: int) -> tuple[list[nn.Module], ParamSites]:
    """Modules that have a weight each, of a part's parameters, and their sites."""
    modules = []
    for index in indices:
        modules.append(nn.Module())
        modules[-1].weight = part.params[index]
    sites = [
        ParamSite(module._parameters, "weight", part, index)
        for module, index in zip(modules, indices, strict=True)
    ]
    return modules, ParamSites(sites)


@pytest.fixture
def part(parts_of_ranks: Make) -> ShardedParams:
    """The first rank's of two: its pieces are not whole."""
    return parts_of_ranks(2, torch.arange(12.0).view(3, 4), torch.arange(4.0))[0]


@pytest.mark.usefixtures("group_of_one")
def test_registry_has_parameters_outside_and_leaves_inside() -> None:
    """Both are made once: the same objects in every step."""
    layer = fully_shard(nn.Linear(4, 3), mp_policy=PRECISE)
    (part,) = layer._flat_param.parts
    param, leaf = layer.weight, part.leaves[0]
    inside = []
    layer.register_forward_pre_hook(lambda module, _: inside.append(module.weight))
    for _ in range(2):
        layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert layer.weight is param
    assert all(each is leaf for each in inside)
    assert len(inside) == 2


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("value", [None, torch.ones(3, 5), torch.ones(12), torch.ones(())])
def test_value_of_another_shape_is_refused_by_name(value: Tensor | None) -> None:
    """Also one that has as many elements, and none at all; the old one is back afterwards."""
    layer = fully_shard(nn.Linear(4, 3), mp_policy=PRECISE)
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


def test_site_has_its_parameters_name(part: ShardedParams) -> None:
    """As the unit calls it, whatever its key is."""
    _, sites = _sites(part, 1, 0)
    assert [site.name for site in sites] == ["p1", "p0"]


def test_nothing_is_new_where_nothing_was_put(part: ShardedParams) -> None:
    """Nor where the leaves are in place, or a parameter was changed in place."""
    _, sites = _sites(part, 0, 1)
    assert not sites.absorb_changes()
    with torch.no_grad():
        part.params[0].add_(1)
    assert not sites.absorb_changes()
    sites.swap_in()
    assert not sites.absorb_changes()


def _whole(dtype: torch.dtype) -> Tensor:
    return torch.arange(100, 112).view(3, 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("by_data", [False, True])
def test_whole_value_is_taken_in_its_piece(
    part: ShardedParams, dtype: torch.dtype, by_data: bool
) -> None:
    """Of any dtype; the optimizer's parameter is back and views the shard."""
    (module,), sites = _sites(part, 0)
    param = module.weight
    if by_data:
        param.data = _whole(torch.float32)
    else:
        module.weight = nn.Parameter(_whole(dtype), requires_grad=False)
    assert sites.absorb_changes()
    assert module.weight is param
    assert param.requires_grad
    assert torch.equal(param.flatten(), _whole(torch.float32).flatten()[: param.numel()])
    assert param.data_ptr() == part.shard.data_ptr()
    assert not sites.absorb_changes()


def test_value_of_a_pieces_shape_is_that_piece(part: ShardedParams) -> None:
    """What was read from the module may be put there again, changed."""
    (module,), sites = _sites(part, 0)
    param, value = module.weight, module.weight.detach() + 5
    module.weight = nn.Parameter(value.clone())
    assert sites.absorb_changes()
    assert module.weight is param
    assert torch.equal(param, value)


def test_value_is_taken_from_any_site_of_a_tied_parameter(part: ShardedParams) -> None:
    """It stays tied."""
    for index in (0, 1):
        modules, sites = _sites(part, 0, 0)
        param = modules[0].weight
        modules[index].weight = nn.Parameter(torch.full((3, 4), float(index)))
        assert sites.absorb_changes()
        assert modules[0].weight is modules[1].weight is param
        assert torch.equal(param, torch.full_like(param, index))


def test_removed_parameter_is_refused(part: ShardedParams) -> None:
    """As if None had been put there."""
    (module,), sites = _sites(part, 0)
    del module.weight
    with pytest.raises(ParameterError, match="'p0' was re-assigned with shape None"):
        sites.absorb_changes()
    assert part.pointers[0] == part.shard.data_ptr()


def test_leaves_are_frozen_as_parameters_are(part: ShardedParams) -> None:
    """And trained again."""
    _, sites = _sites(part, 0, 1)
    for trainable in (False, True):
        part.params[0].requires_grad_(trainable)
        assert not sites.absorb_changes()
        assert [leaf.requires_grad for leaf in part.leaves] == [trainable, True]


def test_frozen_segment_cannot_be_trained(parts_of_ranks: Make) -> None:
    """It has no memory for gradients."""
    part, _ = parts_of_ranks(2, torch.zeros(3), trainable=False)
    _, sites = _sites(part, 0)
    part.params[0].requires_grad_(True)
    text = (
        "flat_param.fully_shard: parameter 'p0' was frozen when it was sharded and is trainable "
        "now, but frozen segments have no gradient buffers. Make it trainable before fully_shard."
    )
    with pytest.raises(ParameterError, match=re.escape(text)):
        sites.absorb_changes()
    assert not part.leaves[0].requires_grad


def _show(part: ShardedParams, sites: ParamSites) -> tuple[Tensor, ...]:
    part.full.untyped_storage().resize_(part.full.nbytes)
    part.full.zero_()
    sites.show()
    return part.leaves


def test_leaves_are_shown_until_they_are_not(part: ShardedParams) -> None:
    """Each at its site; nothing was put in place of them."""
    modules, sites = _sites(part, 1, 0, 1)
    params = [module.weight for module in modules]
    assert not sites.shows
    shown = _show(part, sites)
    assert sites.shows
    assert [module.weight for module in modules] == [shown[1], shown[0], shown[1]]
    assert not sites.end_show()
    assert not sites.shows
    assert all(module.weight is param for module, param in zip(modules, params, strict=True))


@pytest.mark.parametrize("shows", [False, True])
def test_shown_tensors_are_hidden_for_a_while(part: ShardedParams, shows: bool) -> None:
    """Until the block ends, by an exception too; what is not shown stays so."""
    (module,), sites = _sites(part, 0)
    param = module.weight
    shown = _show(part, sites)[0] if shows else param
    with pytest.raises(KeyboardInterrupt), sites.hidden():
        assert module.weight is param
        raise KeyboardInterrupt
    assert module.weight is shown
    if shows:
        with sites.hidden():
            sites.end_show()
    assert module.weight is param


@pytest.mark.parametrize("by_data", [False, True])
def test_what_is_put_in_place_of_shown_tensors_is_taken(part: ShardedParams, by_data: bool) -> None:
    """And said; also where it is other memory of the leaf, which then has its own again."""
    modules, sites = _sites(part, 0, 1)
    param = part.params[0]
    shown = _show(part, sites)
    if by_data:
        modules[0].weight.data = _whole(torch.float64).float()
    else:
        modules[0].weight = nn.Parameter(_whole(torch.float64))
    assert sites.end_show()
    assert modules[0].weight is param
    assert torch.equal(param.flatten(), _whole(torch.float32).flatten()[: param.numel()])
    assert shown[0].data_ptr() == part.full.data_ptr()


def test_leaves_without_a_write_have_no_new_version(part: ShardedParams) -> None:
    """A backward that needs them goes on."""
    _, sites = _sites(part, 0)
    _show(part, sites)
    version = part.leaves[0]._version
    sites.end_show()
    assert part.leaves[0]._version == version


@pytest.mark.parametrize("where", ["params", "leaves"])
def test_own_entries_in_place_of_shown_tensors_are_no_values(
    part: ShardedParams, where: str
) -> None:
    """Where a forward or a hidden block has put them there meanwhile."""
    (module,), sites = _sites(part, 0)
    before = part.params[0].detach().clone()
    _show(part, sites)
    module._parameters["weight"] = getattr(part, where)[0]
    assert not sites.end_show()
    assert torch.equal(part.params[0], before)


def test_copies_are_shown_in_place_of_parameters(part: ShardedParams) -> None:
    """Until their end, which says what was at each site, re-assigned ones last."""
    modules, sites = _sites(part, 0, 1, 0)
    copies = tuple(nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (4,)))
    sites.show_copies({part: copies})
    assert sites.shows_copies
    sites.swap_in()
    sites.swap_out()
    assert [module.weight for module in modules] == [copies[0], copies[1], copies[0]]
    text = "flat_param.whole_params: the module has copies of whole parameters, but only its"
    with pytest.raises(StateError, match=re.escape(text)):
        sites.absorb_changes()
    modules[0].weight = other = nn.Parameter(torch.zeros(3, 4))
    del modules[1].weight
    found = [value for _, value in sites.end_copies()]
    assert [id(each) for each in found] == [id(each) for each in (copies[0], other, None)]
    assert not sites.shows_copies
    for module, index in zip(modules, (0, 1, 0), strict=True):
        assert module.weight is part.params[index]


def test_entries_are_taken_up_anew(part: ShardedParams) -> None:
    """After the leaves were made anew, those go into the module."""
    (module,), sites = _sites(part, 0)
    part.remake()
    sites.swap_in()
    assert module.weight is not part.leaves[0]
    sites.refresh()
    sites.swap_in()
    assert module.weight is part.leaves[0]
