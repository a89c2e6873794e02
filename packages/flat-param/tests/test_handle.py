"""FlatParamHandle: values, padding, shards, and the tensors that modules have as parameters."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from flat_param import ParameterError, StateError
from flat_param.handle import FlatParamHandle
from flat_param.handle import HandleShardingStrategy as Strategy
from torchparts_conformance.cases.flat_param._builds import Group


def handle_of(module, rank=0, world=None, **changes):
    """Flatten all of a module into a handle; with `world`, as one of so many ranks."""
    group = None if world is None else Group(rank, world)
    return FlatParamHandle(list(module.parameters()), module, process_group=group, **changes)


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.ones(3, dtype=torch.complex64),),
        (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(5).to(torch.float8_e4m3fn)),
        (torch.ones(1).expand(4), torch.ones(0, 2)),
    ],
    ids=["complex", "float8", "expanded and empty"],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_every_kind_of_tensor_keeps_its_values(holder, tensors, use_orig_params):
    """torch refuses these or computes nonsense."""
    expected = [tensor.tolist() for tensor in tensors]
    module = holder(*tensors)
    handle_of(module, use_orig_params=use_orig_params)
    assert [getattr(module, f"p{i}").tolist() for i in range(len(tensors))] == expected


@pytest.mark.parametrize("trained", [False, True])
def test_a_flat_parameter_is_trained_where_any_of_its_parameters_is(mlp, trained):
    """Frozen alone, it is frozen; with original parameters kept, one is enough."""
    mlp.requires_grad_(False)
    mlp[2].bias.requires_grad_(trained)
    assert handle_of(mlp, use_orig_params=True).flat_param.requires_grad is trained


def test_foreign_parameters_are_listed_by_position_and_shape(mlp):
    """The error names each foreign parameter, and the module is unchanged."""
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
    with pytest.raises(ParameterError, match=r"tree: params\[0\] \(2, 3\), but"):
        FlatParamHandle([foreign], mlp)


@pytest.mark.parametrize("by", ["data", "object"])
@pytest.mark.parametrize("world", [1, 2])
def test_replaced_original_parameter_is_refused(mlp, by, world):
    """By name, before anything is gathered; values that are copied in place are taken."""
    strategy = Strategy.NO_SHARD if world == 1 else Strategy.FULL_SHARD
    handle = handle_of(mlp, sharding_strategy=strategy, use_orig_params=True, rank=0, world=world)
    handle.shard()
    handle.init_flat_param_attributes()
    with torch.no_grad():
        mlp[0].weight.fill_(2.0)
    assert handle.flat_param[:35].tolist() == [2.0] * 35
    if by == "data":
        mlp[0].weight.data = torch.ones(35)
    else:
        mlp[0].weight = nn.Parameter(torch.ones(35))
    with pytest.raises(StateError, match=r"parameter '0.weight' or its data was replaced, but"):
        handle.unshard()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_shard_unshard_reshard_without_a_group(mlp, use_orig_params):
    """One rank alone goes through the whole cycle, twice each, and computes the same."""
    x = torch.randn(2, 5)
    expected = mlp(x)
    handle = handle_of(mlp, use_orig_params=use_orig_params, offload_params=True)
    handle.shard()
    handle.init_flat_param_attributes()
    for _ in range(2):
        assert handle.pre_unshard() is False
        handle.unshard()
        handle.post_unshard()
        assert torch.equal(mlp(x), expected)
        handle.reshard(True)
        handle.reshard(True)
        handle.post_reshard()
    assert not handle.needs_unshard()


def test_original_parameters_come_back_as_shards(mlp):
    """With `use_orig_params`, each parameter object holds its part, flat, or nothing."""
    params = list(mlp.parameters())
    handle = handle_of(mlp, use_orig_params=True, rank=0, world=2)
    handle.shard()
    assert [param.numel() for param in params] == [35, 0, 0, 0]
    assert mlp[0].weight is params[0]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_cast_makes_one_rank_gather_and_free(mlp, use_orig_params):
    """With another dtype the whole is a copy, which is needed, there, and gone again."""
    params = list(mlp.parameters()) if use_orig_params else []
    handle = handle_of(mlp, mp_param_dtype=torch.bfloat16, use_orig_params=use_orig_params)
    handle.shard()
    handle.init_flat_param_attributes()
    assert handle.needs_unshard()
    handle.unshard()
    assert not handle.needs_unshard()
    assert not handle.pre_unshard()
    assert list(mlp.parameters()) == []
    assert mlp[0].weight.dtype == torch.bfloat16
    handle.reshard(True)
    assert all(a is b for a, b in zip(mlp.parameters(), params, strict=True))
    assert {param.dtype for param in (handle.flat_param, *params)} == {torch.float32}


def test_no_shard_has_no_part_to_gather(mlp):
    """It never needs `unshard`, on many ranks, and does not call itself sharded."""
    handle = handle_of(mlp, rank=3, world=4, sharding_strategy=Strategy.NO_SHARD)
    assert not handle.uses_sharded_strategy
    handle.shard()
    assert not handle.needs_unshard()
    assert handle.flat_param.numel() == 66
    assert handle_of(torch.nn.Linear(1, 1)).uses_sharded_strategy


def test_a_part_is_a_copy_where_it_is_not_the_whole(holder):
    """So that the whole can be freed; one rank keeps the memory it has."""
    tensor = torch.ones(2, 4)
    handle = handle_of(holder(torch.ones(1)))
    home = tensor.untyped_storage().data_ptr()
    for world, same in ((1, True), (2, False), (3, False)):
        part, _ = handle._get_shard(tensor, 0, world)
        assert (part.untyped_storage().data_ptr() == home) is same


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_sharded_module_is_not_unflattened(mlp, use_orig_params):
    """Nor copied: a part cannot be whole parameters; the refusal comes before anything changes."""
    handle = handle_of(mlp, rank=0, world=2, use_orig_params=use_orig_params)
    handle.shard()
    before = [mlp[0].weight, mlp[2].bias]
    for use in (handle.unflatten_as_params().__enter__, partial(copy.deepcopy, mlp)):
        with pytest.raises(StateError, match=r"is sharded, .* Call unshard\(\) first"):
            use()
    assert all(a is b for a, b in zip(before, [mlp[0].weight, mlp[2].bias], strict=True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_parenthesis_closes_whatever_is_raised_in_it(mlp, error):
    """After an error or Ctrl-C there are tensors again, and what was written is kept."""
    handle = handle_of(mlp)
    with pytest.raises(error), handle.unflatten_as_params():
        mlp[2].bias.data.fill_(7.0)
        raise error
    assert list(mlp.named_parameters()) == []
    assert mlp[2].bias.tolist() == [7.0] * 3
    assert handle.flat_param[-3:].tolist() == [7.0] * 3


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_made_anew_train_as_the_flat_one_does(mlp, trained):
    """Frozen ones stay frozen inside the parenthesis."""
    handle = handle_of(mlp.requires_grad_(trained))
    with handle.unflatten_as_params():
        assert {param.requires_grad for param in mlp.parameters()} == {trained}


def test_original_objects_come_back_inside_the_parenthesis(mlp):
    """With `use_orig_params` they are the very objects, tied places too."""
    mlp.add_module("tied", nn.Linear(5, 7, bias=False))
    mlp.tied.weight = mlp[0].weight
    params = list(mlp.parameters())
    handle = handle_of(mlp, use_orig_params=True)
    with handle.unflatten_as_params():
        assert all(a is b for a, b in zip(mlp.parameters(), params, strict=True))
        assert mlp.tied.weight is params[0]
    assert mlp.tied.weight is mlp[0].weight


def test_views_reach_the_flat_parameter_under_no_grad(mlp):
    """They are made with gradients, wherever the handle is called from."""
    with torch.no_grad():
        handle = handle_of(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    assert handle.flat_param.grad is not None
