"""Which elements each rank of a handle holds."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from flat_param.handle import FlatParamShardMetadata


def _linears(*sizes):
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


@pytest.mark.parametrize(
    ("start", "end", "names", "offsets"),
    [
        (0, 0, ["0.weight"], [(0, 0)]),
        (0, 50, ["0.weight"], [(0, 50)]),
        (50, 149, ["0.weight", "1.weight"], [(50, 99), (0, 49)]),
        (100, 1000, ["1.weight", "2.weight"], [(0, 99), (0, 99)]),
        (299, 299, ["2.weight"], [(99, 99)]),
    ],
)
def test_shard_metadata_unaligned(start, end, names, offsets, handle_of):
    """300 elements without padding."""
    handle = handle_of(_linears(10, 10, 10, 10))
    handle.flat_param._shard_param_infos = handle._get_shard_metadata(start, end)
    shapes, numels = [(10, 10)] * len(names), [100] * len(names)
    expected = FlatParamShardMetadata(names, shapes, numels, offsets)
    assert handle.shard_metadata() == expected


@pytest.mark.parametrize(
    ("sizes", "dtype", "parts"),
    [
        (
            (3, 7, 5, 5),
            None,  # 21 + (3) + 35 + (1) + 25 = 85
            [(0, 42, [(0, 20), (0, 18)]), (43, 85, [(19, 34), (0, 24)])],
        ),
        (
            (2, 5, 5, 3),
            torch.float16,  # 10 + (6) + 25 + (7) + 15 = 63
            [(0, 31, [(0, 9), (0, 15)]), (32, 63, [(16, 24), (0, 14)])],
        ),
    ],
)
def test_shard_metadata_aligned(sizes, dtype, parts, handle_of):
    """Padding counts for positions and appears in no field."""
    handle = handle_of(_linears(*sizes), use_orig_params=True, mp_param_dtype=dtype)
    for start, end, offsets in parts:
        handle.flat_param._shard_param_infos = handle._get_shard_metadata(start, end)
        assert handle.shard_metadata().param_offsets == tuple(offsets)


def test_shard_metadata_records_memory_format(handle_of):
    """Channels-last kernels keep stride and the fact that they were not contiguous."""
    model = nn.Sequential(nn.Conv2d(10, 20, 1, bias=False)).to(memory_format=torch.channels_last)
    handle = handle_of(model)
    handle.shard()
    assert handle.shard_metadata().param_strides == ((10, 1, 10, 10),)
    assert handle.shard_metadata().param_contiguities == (False,)
    assert model[0].weight.stride() == (10, 1, 10, 10)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("numel", [0, 1, 7, 8])
def test_parts_of_all_ranks_are_the_whole_and_equally_long(handle_of, holder, numel, world):
    """Zeros at the end, on ranks without an element too; the noted numbers agree."""
    tensor = torch.arange(1.0, numel + 1)
    handle = handle_of(holder(torch.ones(1)))
    parts = []
    for rank in range(world):
        part, lacking = handle._get_shard(tensor, rank, world)
        unpadded, same = handle._get_unpadded_shard(tensor, rank, world)
        assert part.shape == handle._get_sharded_size(tensor, rank, world)
        assert lacking == same == part.numel() - unpadded.numel()
        assert torch.equal(part[: unpadded.numel()], unpadded)
        parts.append(part)
    whole = torch.cat(parts)
    assert torch.equal(whole[:numel], tensor)
    assert not whole[numel:].any()


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


def test_metadata_leaves_out_what_has_no_part(handle_of, mlp):
    """All six fields keep to the parameters that have one."""
    handle = handle_of(mlp, rank=1, world=2)
    handle.shard()
    data = handle.shard_metadata()
    assert data.param_names == tuple(handle._fqns_in_shard)
    assert {len(field) for field in data} == {4}
    handle = handle_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), rank=1, world=2)
    handle.shard()
    data = handle.shard_metadata()
    assert data.param_names == tuple(handle._fqns_in_shard) == ("1.weight", "1.bias")
    assert data.param_shapes == ((2, 2), (2,))
    assert data.param_strides == ((2, 1), (1,))
    assert data.param_contiguities == (True, True)
    assert data.param_numels == (4, 2)
    assert data.param_offsets == ((0, 3), (0, 1))


def test_offsets_count_padding(handle_of, mlp):
    """Every stretch follows the one before, gaps as stretches of their own."""
    handle = handle_of(mlp, use_orig_params=True)
    offsets = handle._get_flat_param_offsets()
    assert offsets == [(0, 34), (35, 35), (36, 42), (43, 43), (44, 64), (65, 67), (68, 70)]
    assert [stop - start + 1 for start, stop in offsets] == list(
        handle.flat_param._numels_with_padding
    )
    assert handle_of(nn.Linear(2, 2))._get_flat_param_offsets() == [(0, 3), (4, 5)]
