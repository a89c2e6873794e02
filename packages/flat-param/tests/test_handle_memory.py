"""How a handle's flat parameter becomes a shard, whole, and a shard again."""

import copy

import pytest
import torch

from flat_param import HandleShardingStrategy as Strategy


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_shard_unshard_reshard_without_a_group(mlp, use_orig_params, handle_of):
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


def test_low_precision_is_for_the_whole_and_full_precision_for_the_shard(mlp, handle_of):
    """Unsharded in bfloat16, sharded in float32."""
    handle = handle_of(mlp, mp_param_dtype=torch.bfloat16)
    handle.shard()
    handle.init_flat_param_attributes()
    assert handle.pre_unshard()
    handle.unshard()
    assert mlp[0].weight.dtype == torch.bfloat16
    handle.reshard(True)
    assert handle.flat_param.dtype == torch.float32


def test_shards_of_two_ranks_make_the_whole(mlp, handle_of):
    """Each rank keeps its half, frees the rest, and names what it holds."""
    whole = torch.cat([param.detach().flatten() for param in mlp.parameters()])
    halves = []  # 66 elements: 33 of the first weight; its last 2, then 7, 21 and 3
    held = [["0.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]]
    for rank in range(2):
        model = copy.deepcopy(mlp)
        params = list(model.parameters())
        handle = handle_of(model, rank=rank, world=2)
        handle.shard()
        halves.append(handle.flat_param.detach())
        assert handle.is_sharded(handle.flat_param)
        assert not any(param.numel() for param in params)
        assert handle._fqns_in_shard == held[rank]
    assert torch.equal(torch.cat(halves)[:66], whole)


def test_original_parameters_come_back_as_shards(mlp, handle_of):
    """With `use_orig_params`, each parameter object holds its part, flat, or nothing."""
    params = list(mlp.parameters())
    handle = handle_of(mlp, use_orig_params=True, rank=0, world=2)
    handle.shard()
    assert [param.numel() for param in params] == [35, 0, 0, 0]
    assert mlp[0].weight is params[0]


def test_no_shard_keeps_the_whole(mlp, handle_of):
    """NO_SHARD has one shard, everything, on any number of ranks."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, rank=1, world=4)
    handle.shard()
    handle.reshard(True)
    assert handle.shard_metadata().param_names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert not handle.is_sharded(handle.flat_param)


def test_moving_the_flat_parameter_moves_the_views(mlp, handle_of):
    """`flat_param_to` renews what the module sees."""
    handle = handle_of(mlp)
    handle.flat_param_to(torch.float64)
    assert mlp[0].weight.dtype == torch.float64


def test_unshard_takes_in_what_was_replaced(mlp, handle_of):
    """The forward computes with it."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    mlp[2].weight.data = torch.zeros(3, 7)
    handle.unshard()
    assert torch.equal(mlp(torch.ones(1, 5))[0], mlp[2].bias)
