"""How a handle's flat parameter becomes a shard, whole, and a shard again."""

import copy

import pytest
import torch

from flat_param.handle import HandleShardingStrategy as Strategy


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


def test_is_sharded_tells_a_shard_from_the_whole(handle_of, mlp):
    """False before the first `shard`, for another size, and while the whole is gathered."""
    handle = handle_of(mlp, mp_param_dtype=torch.bfloat16)
    assert not handle.is_sharded(handle.flat_param)
    handle.shard()
    handle.init_flat_param_attributes()
    assert handle.is_sharded(handle.flat_param)
    assert not handle.is_sharded(torch.ones(5))
    handle.unshard()
    assert not handle.is_sharded(handle.flat_param)
    handle.reshard(False)
    assert "_full_param_padded" in vars(handle.flat_param)
    handle.unshard()
    handle.reshard(True)
    assert "_full_param_padded" not in vars(handle.flat_param)
    assert handle.is_sharded(handle.flat_param)


def test_a_cast_makes_one_rank_gather_and_free(handle_of, mlp):
    """With another dtype the whole is a copy, which is needed, there, and gone again."""
    params = list(mlp.parameters())
    handle = handle_of(mlp, mp_param_dtype=torch.bfloat16, use_orig_params=True)
    handle.shard()
    handle.init_flat_param_attributes()
    assert handle.needs_unshard()
    handle.unshard()
    assert not handle.needs_unshard()
    assert not handle.pre_unshard()
    assert list(mlp.parameters()) == []
    handle.reshard(True)
    assert all(a is b for a, b in zip(mlp.parameters(), params, strict=True))
    assert {param.dtype for param in params} == {torch.float32}


def test_no_shard_has_no_part_to_gather(handle_of, mlp):
    """It never needs `unshard`, on many ranks, and does not call itself sharded."""
    handle = handle_of(mlp, rank=3, world=4, sharding_strategy=Strategy.NO_SHARD)
    assert not handle.uses_sharded_strategy
    handle.shard()
    assert not handle.needs_unshard()
    assert handle.flat_param.numel() == 66
    assert handle_of(torch.nn.Linear(1, 1)).uses_sharded_strategy


def test_the_part_is_the_shard_that_is_kept(handle_of, mlp):
    """What `unshard` gathers from is the flat parameter itself, offloaded or not."""
    for offload in (False, True):
        model = copy.deepcopy(mlp)
        handle = handle_of(model, rank=1, world=2, offload_params=offload)
        handle.shard()
        handle.init_flat_param_attributes()
        flat = handle.flat_param
        assert flat._local_shard.data_ptr() == flat.data_ptr()
        assert flat._local_shard.device.type == "cpu"
        assert not flat._local_shard.requires_grad


def test_casting_a_shard_casts_the_parts_in_the_module(handle_of, mlp):
    """With `use_orig_params`, whole or not, the same objects follow."""
    params = list(mlp.parameters())
    handle = handle_of(mlp, rank=0, world=2, use_orig_params=True)
    handle.flat_param_to(torch.float64)
    assert {param.dtype for param in mlp.parameters()} == {torch.float64}
    handle.shard()
    handle.flat_param_to(torch.bfloat16)
    assert [param.numel() for param in mlp.parameters()] == [35, 0, 0, 0]
    assert {param.dtype for param in params} == {torch.bfloat16}


def test_moving_takes_in_what_was_replaced(handle_of, mlp):
    """A new object in a parameter's place survives the cast."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    mlp[2].bias.data = torch.full((3,), 5.0)
    handle.flat_param_to(torch.float64)
    assert mlp[2].bias.tolist() == [5.0] * 3
