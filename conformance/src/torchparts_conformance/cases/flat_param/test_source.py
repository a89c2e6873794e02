"""Requirements from the source's tests of a handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import Group, blocks, linears, make_handle

DTYPES = [torch.float32, torch.float16]


@requirement(
    "FP-001",
    "Flattening parts of a model MUST leave each part one flat parameter with all its elements, "
    "and MUST leave the other parts unchanged.",
    source="test_partial_flattening",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_model_are_flattened(part, device, dtype):
    """A flattened block has one parameter with all elements; the others are unchanged."""
    model, _ = blocks(device, dtype)
    numel = sum(param.numel() for param in model.parameters())
    for index in (1, 3):
        block = model.blocks[index]
        flat = make_handle(part, block, device).flat_param
        assert list(block.parameters()) == []
        block.register_parameter("_flat_param", flat)
    assert sum(param.numel() for param in model.parameters()) == numel
    assert len(list(model.blocks[0].parameters())) == 6


@requirement(
    "FP-002", "Casting the model MUST cast its flat parameters.", source="test_partial_flattening"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_of_the_model_reaches_flat_parameters(part, device, dtype):
    """`module.to(dtype)` casts a registered flat parameter."""
    model, _ = blocks(device, dtype)
    model.blocks[1].register_parameter(
        "_flat_param", make_handle(part, model.blocks[1], device).flat_param
    )
    other = DTYPES[dtype is torch.float32]
    model.to(other)
    assert model.blocks[1]._flat_param.dtype == other


@requirement(
    "FP-003",
    "An empty list of parameters MUST be refused with a ValueError that says so.",
    source="test_flatten_nothing",
)
def test_an_empty_list_is_refused(part, device):
    """A handle needs parameters."""
    model, _ = blocks(device, torch.float32)
    group, strategy = Group(0, 1), part.HandleShardingStrategy.FULL_SHARD
    sentence = "Cannot construct a FlatParamHandle with an empty parameter list"
    with pytest.raises(ValueError, match=sentence):
        part.FlatParamHandle(
            [], model, torch.device(device), strategy, False, None, None, False, group, False
        )


def _wrap_empty(part: Any, rank: int, world_size: int) -> dict[str, Any]:
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    if hasattr(part, "fully_shard"):
        wrapped = part.fully_shard(Empty())
    else:
        wrapped = part.FullyShardedDataParallel(Empty(), device_id=torch.device("cpu"))
    flat = wrapped._flat_param
    return {
        "parameters": len(list(wrapped.parameters())),
        "flat": bool(getattr(flat, "parts", flat)),
        "out": wrapped(torch.ones(2)).tolist(),
    }


@requirement(
    "FP-004",
    "A module without parameters MUST be wrapped without a flat parameter and give the same "
    "results.",
    source="test_empty_module",
)
def test_a_module_without_parameters_is_wrapped(part, device, ranks):
    """It has no flat parameter and gives the same results."""
    (result,) = ranks(1, _wrap_empty)
    assert result == {"parameters": 0, "flat": False, "out": [2.0, 2.0]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tied",
    [
        pytest.param(
            False,
            marks=requirement(
                "FP-005",
                "A flat parameter MUST have as many elements as its parameters.",
                source="test_numel_without_shared_params",
            ),
        ),
        pytest.param(
            True,
            marks=requirement(
                "FP-006",
                "A tied parameter MUST be stored once.",
                source="test_numel_with_shared_params",
            ),
        ),
    ],
)
def test_numel_is_unchanged(part, device, dtype, tied):
    """A flat parameter has as many elements as its parameters, tied ones counted once."""
    model, _ = blocks(device, dtype, tied=tied)
    numel = sum(param.numel() for param in model.parameters())
    assert make_handle(part, model, device).flat_param.numel() == numel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tied",
    [
        pytest.param(
            False,
            marks=requirement(
                "FP-007",
                "A flattened module MUST give the same output as before.",
                source="test_output_without_shared_params",
            ),
        ),
        pytest.param(
            True,
            marks=requirement(
                "FP-008",
                "A flattened module with tied parameters MUST give the same output as before.",
                source="test_output_with_shared_params",
            ),
        ),
    ],
)
def test_the_output_is_unchanged(part, device, dtype, tied):
    """Bit-identical, since the same numbers reach the same kernels."""
    model, x = blocks(device, dtype, tied=tied)
    expected = model(x)
    make_handle(part, model, device)
    assert torch.equal(model(x), expected)


@requirement(
    "FP-009",
    "An optimizer step on the flat parameter MUST change tied parameters as a step on the plain "
    "module does.",
    source="test_pnorm_after_step_with_shared_params",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_moves_tied_parameters_like_the_plain_module(part, device, dtype):
    """The norm after a step of SGD is that of the plain model."""
    norms = []
    for flattened in (False, True):
        model, x = blocks(device, dtype, tied=True)
        params = [make_handle(part, model, device).flat_param] if flattened else model.parameters()
        params = list(params)
        optimizer = torch.optim.SGD(params, lr=0.01)
        model(x).sum().backward()
        optimizer.step()
        norms.append(torch.stack([param.detach().double().norm() for param in params]).norm())
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=0)


def _check_metadata(handle, start, end, names, shapes, offsets):
    handle.flat_param._shard_param_infos = handle._get_shard_metadata(start, end)
    found = handle.shard_metadata()
    assert list(found.param_names) == names
    assert [tuple(shape) for shape in found.param_shapes] == shapes
    assert list(found.param_numels) == [a * b for a, b in shapes]
    assert [tuple(pair) for pair in found.param_offsets] == offsets


@requirement(
    "FP-010",
    "With original parameters kept, each parameter MUST start at a multiple of 16 bytes, and in "
    "shard metadata the padding MUST count for positions only.",
    source="test_flat_param_shard_metadata_aligned_full_precision",
)
def test_metadata_with_alignment_in_full_precision(part, device):
    """21 + (3) + 35 + (1) + 25 = 85 elements; 16 bytes are four of float32."""
    module = linears(3, 7, 5, 5).to(device)
    handle = make_handle(part, module, device, use_orig_params=True)
    assert handle.flat_param.numel() == 85
    names = ["0.weight", "1.weight", "2.weight"]
    shapes = [(7, 3), (5, 7), (5, 5)]
    _check_metadata(handle, 0, 42, names[:2], shapes[:2], [(0, 20), (0, 18)])
    _check_metadata(handle, 43, 85, names[1:], shapes[1:], [(19, 34), (0, 24)])


@requirement(
    "FP-011",
    "Alignment MUST be that of the dtype that parameters have in forward.",
    source="test_flat_param_shard_metadata_aligned_mixed_precision",
)
def test_metadata_with_alignment_in_mixed_precision(part, device):
    """10 + (6) + 25 + (7) + 15 = 63 elements; 16 bytes are eight of float16."""
    module = linears(2, 5, 5, 3).to(device)
    handle = make_handle(part, module, device, use_orig_params=True, mp_param_dtype=torch.float16)
    assert handle.flat_param.numel() == 63
    names = ["0.weight", "1.weight", "2.weight"]
    shapes = [(5, 2), (5, 5), (3, 5)]
    _check_metadata(handle, 0, 31, names[:2], shapes[:2], [(0, 9), (0, 15)])
    _check_metadata(handle, 32, 63, names[1:], shapes[1:], [(16, 24), (0, 14)])


@requirement(
    "FP-012",
    "Shard metadata MUST be right for any range, also beyond the end.",
    source="test_flat_param_shard_metadata_unaligned",
)
def test_metadata_without_alignment(part, device):
    """Ranges may start anywhere and reach beyond the end."""
    handle = make_handle(part, linears(10, 10, 10, 10).to(device), device)
    names, square = ["0.weight", "1.weight", "2.weight"], (10, 10)
    _check_metadata(handle, 0, 0, names[:1], [square], [(0, 0)])
    _check_metadata(handle, 50, 149, names[:2], [square] * 2, [(50, 99), (0, 49)])
    _check_metadata(handle, 100, 1000, names[1:], [square] * 2, [(0, 99), (0, 99)])


@requirement(
    "FP-013",
    "The flat parameter's gradient MUST contain the gradients of all parameters, in the order of "
    "the parameters.",
    rationale="an optimizer on the flat parameter uses only this gradient",
    source="torch.distributed.fsdp._flat_param.FlatParamHandle._use_unsharded_grad_views",
    quote="set to be views into the unsharded flat parameter's gradient",
)
def test_gradients_reach_the_flat_parameter(part, device):
    """Bitwise those of the plain model, one after another."""
    plain, x = blocks(device, torch.float32)
    plain(x).sum().backward()
    model, _ = blocks(device, torch.float32)
    handle = make_handle(part, model, device)
    model(x).sum().backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
    assert torch.equal(handle.flat_param.grad, expected)


@requirement(
    "FP-014",
    "The shards of all ranks MUST be of equal size, and in rank order they MUST form the whole "
    "flat parameter.",
    rationale="otherwise one all-gather cannot restore the flat parameter",
    source="torch.distributed.fsdp._flat_param.FlatParameter",
    quote="right-hand-side padding for divisibility by the world size",
)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_shards_form_the_whole_parameter(part, device, world_size):
    """Every rank has an equal part; the parts in order are the parameters."""
    shards = []
    for rank in range(world_size):
        model, _ = blocks(device, torch.float32)
        whole = torch.cat([param.detach().flatten() for param in model.parameters()])
        handle = make_handle(part, model, device, process_group=Group(rank, world_size))
        handle.shard()
        shards.append(handle.flat_param.detach())
    assert len({shard.numel() for shard in shards}) == 1
    assert torch.equal(torch.cat(shards)[: whole.numel()], whole)


def _cycle(part: Any, rank: int, world_size: int) -> list[bool]:
    model, _ = blocks("cpu", torch.float32)
    whole = torch.cat([param.detach().flatten() for param in model.parameters()])
    handle = make_handle(part, model, "cpu", process_group=torch.distributed.group.WORLD)
    handle.shard()
    handle.init_flat_param_attributes()
    shard = handle.flat_param.detach().clone()
    found = [shard.numel() < whole.numel()]
    for _ in range(2):
        handle.pre_unshard()
        handle.unshard()
        handle.post_unshard()
        found.append(torch.equal(handle.flat_param.detach(), whole))
        handle.reshard(True)
        handle.post_reshard()
        found.append(torch.equal(handle.flat_param.detach(), shard))
    return found


@requirement(
    "FP-019",
    "Unshard MUST give each rank the whole flat parameter, and reshard its own shard again.",
    rationale="every user of a handle without the wrapper runs this cycle",
    source="torch.distributed.fsdp._flat_param.FlatParamHandle.unshard",
    quote="all-gathering the flat parameter and switching to using the unsharded flat parameter",
)
def test_two_ranks_unshard_and_reshard(part, device, ranks):
    """Unsharded, the flat parameter has all elements; resharded, each rank has its own part."""
    assert ranks(2, _cycle) == [[True] * 5] * 2
