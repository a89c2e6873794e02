"""The drop-in handle against torch's private class, on hundreds of random modules."""

import copy
import random

import pytest
import torch
from torch import nn

import flat_param
from torchparts_conformance.cases.flat_param._builds import Group

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns at its own import and use


def _layer(rng):
    inner, outer = rng.randint(1, 9), rng.randint(1, 9)
    kernel = rng.choice((1, 3))
    return rng.choice(
        (
            lambda: nn.Linear(inner, outer, bias=rng.random() < 0.5),
            lambda: nn.Conv2d(inner, outer, kernel).to(memory_format=torch.channels_last),
            lambda: nn.LayerNorm(inner),
            lambda: nn.Embedding(inner, outer),
        )
    )()


def _module(rng, dtype):
    module = nn.Sequential(*(_layer(rng) for _ in range(rng.randint(1, 5))), nn.Linear(3, 3))
    if rng.random() < 0.4:
        module.append(nn.Linear(3, 3))
        module[-1].weight = module[-2].weight
    if rng.random() < 0.2:
        module.register_parameter("empty", nn.Parameter(torch.ones(0, 3)))
    return module.to(dtype)


def _handle(source, module, strategy, mp_dtype, group, use_orig_params):
    params = list(module.parameters())
    strategy = getattr(source.HandleShardingStrategy, strategy)
    device = torch.device("cpu")
    return source.FlatParamHandle(
        params, module, device, strategy, False, mp_dtype, None, False, group, use_orig_params
    )


@pytest.mark.parametrize("block", range(10))
def test_layout_metadata_and_shards_are_torchs(block):
    """Forty modules a block: same sizes, offsets, metadata and values, outside the padding."""
    theirs = pytest.importorskip("torch.distributed.fsdp._flat_param", reason="torch moved it")
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
        mp_dtype = rng.choice((None, None, torch.float16, torch.bfloat16, torch.float32))
        strategy = rng.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
        size = rng.randint(1, 8)
        group, use_orig_params = Group(rng.randrange(size), size), rng.random() < 0.5
        module = _module(rng, dtype)
        expected, got = (
            _handle(source, copy.deepcopy(module), strategy, mp_dtype, group, use_orig_params)
            for source in (theirs, flat_param.handle)
        )
        _compare_whole(expected, got, rng)
        expected.shard()
        got.shard()
        assert got.shard_metadata() == expected.shard_metadata()
        assert got.flat_param.shape == expected.flat_param.shape
        padded = got.flat_param._shard_numel_padded
        assert not got.flat_param[got.flat_param.numel() - padded :].any()
        assert tuple(got.flat_param._shard_param_infos) == tuple(
            map(tuple, expected.flat_param._shard_param_infos)
        )


def _names(info):
    return [value for value in info if isinstance(value, str)]


def _compare_whole(expected, got, rng):
    numels = expected.flat_param._numels_with_padding
    mask = [
        pad
        for n, pad in zip(numels, expected.flat_param._is_padding_mask, strict=True)
        for _ in range(n)
    ]
    padding = torch.tensor(mask, dtype=torch.bool)
    assert got.flat_param._numels_with_padding == tuple(numels)
    assert torch.equal(got.flat_param[~padding], expected.flat_param[~padding])
    assert not got.flat_param[padding].any()
    for infos in ("_param_infos", "_shared_param_infos"):
        ours, theirs = getattr(got.flat_param, infos), getattr(expected.flat_param, infos)
        assert [_names(info) for info in ours] == [_names(info) for info in theirs]
    for _ in range(3):
        start = rng.randrange(expected.flat_param.numel())
        end = rng.randrange(start, expected.flat_param.numel() + 3)
        theirs = expected._get_shard_metadata(start, end)
        assert got._get_shard_metadata(start, end) == tuple(map(tuple, theirs))
