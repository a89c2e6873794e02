"""Which elements each rank of a handle holds."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from flat_param import FlatParamShardMetadata


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
