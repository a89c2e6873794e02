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


def test_original_parameters_come_back_as_shards(mlp, handle_of):
    """With `use_orig_params`, each parameter object holds its part, flat, or nothing."""
    params = list(mlp.parameters())
    handle = handle_of(mlp, use_orig_params=True, rank=0, world=2)
    handle.shard()
    assert [param.numel() for param in params] == [35, 0, 0, 0]
    assert mlp[0].weight is params[0]


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


def test_a_part_is_a_copy_where_it_is_not_the_whole(handle_of, holder):
    """So that the whole can be freed; one rank keeps the memory it has."""
    tensor = torch.ones(2, 4)
    handle = handle_of(holder(torch.ones(1)))
    home = tensor.untyped_storage().data_ptr()
    for world, same in ((1, True), (2, False), (3, False)):
        part, _ = handle._get_shard(tensor, 0, world)
        assert (part.untyped_storage().data_ptr() == home) is same
        view, _ = handle._get_unpadded_shard(tensor, 0, world)
        assert view.untyped_storage().data_ptr() == home


@pytest.mark.parametrize("rank", range(5))
def test_what_is_noted_of_a_shard_is_what_lies_in_it(handle_of, holder, rank):
    """Names, elements and padding of each of five ranks, a parameter of no elements among them."""
    tensors = (torch.arange(3.0), torch.ones(0, 2), torch.arange(10.0, 16.0).view(2, 3))
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    handle = handle_of(holder(*tensors), rank=rank, world=5)
    handle.shard()
    flat = handle.flat_param
    assert (flat._sharded_size, flat._shard_numel_padded) == ((2,), 1 if rank == 4 else 0)
    found = []
    for param, info in zip(tensors, flat._shard_param_infos, strict=True):
        if info.in_shard:
            part = param.flatten()[info.intra_param_start_idx : info.intra_param_end_idx + 1]
            start = info.offset_in_shard
            assert torch.equal(flat[start : start + info.numel_in_shard], part)
            found.append(part)
    assert torch.equal(torch.cat(found), whole[2 * rank : 2 * rank + 2])
