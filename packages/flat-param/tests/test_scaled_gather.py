"""Segments that are gathered in low precision, as some ranks in one process have them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flat_param import Blocks, MixedPrecision, ParamSpec, Scaled, plan_layout, plan_shard
from flat_param.comm._scaled_gather import make_message, read_messages
from flat_param.sharded._sharded_params import ShardedParams

Make = Callable[..., list[ShardedParams]]
BOUNDARIES = ("element", "row", "tensor", Blocks(3), Blocks((2, 2)))
F32, BF16 = torch.float32, torch.bfloat16
HOW = Scaled(block=8)


def _gather(parts: list[ShardedParams]) -> None:
    for pending in [part.start_gather() for part in parts]:
        assert pending is not None
        pending.wait()


def _tensors() -> tuple[Tensor, ...]:
    """Odd sizes, a transposed matrix, a scalar, nothing, and blocks of their own magnitude."""
    scaled = torch.randn(9, 8) * (10.0 ** torch.arange(-20, 25, 5).to(F32))[:, None]
    return torch.randn(5, 3), torch.randn(6, 7).t(), torch.randn(()), torch.randn(0, 4), scaled


@pytest.mark.parametrize("scale", [torch.float8_e8m0fnu, F32])
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 40])
def test_every_rank_has_what_one_process_rounds_to(
    sent_by_hand: SimpleNamespace,
    parts_of_ranks: Make,
    world: int,
    boundary: Any,
    scale: torch.dtype,
) -> None:
    """Bit by bit, however parameters are cut; and each rank's shard keeps its values."""
    how = Scaled(block=8, scale_dtype=scale)
    tensors = _tensors()
    parts = parts_of_ranks(world, *tensors, boundary=boundary, scaled=how)
    _gather(parts)
    for part in parts:
        for index, (leaf, tensor) in enumerate(zip(part.leaves, tensors, strict=True)):
            assert torch.equal(leaf.detach(), sent_by_hand.as_sent(tensor, how))
            assert leaf.stride() == tensor.stride()
            assert torch.equal(
                part.params[index].detach().flatten(), part.cut(index, tensor).flatten()
            )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    st.one_of(st.integers(1, 12), st.tuples(st.integers(1, 5), st.integers(1, 5))),
    st.integers(1, 7),
    st.sampled_from(BOUNDARIES),
    st.sampled_from([torch.float8_e8m0fnu, F32]),
)
def test_messages_put_together_are_the_parameters(
    sent_by_hand: SimpleNamespace,
    shapes: list[tuple[int, ...]],
    block: int | tuple[int, int],
    world: int,
    boundary: Any,
    scale: torch.dtype,
) -> None:
    """Whatever shapes, blocks, ranks and boundaries there are."""
    how = Scaled(block=block, scale_dtype=scale)
    if how.tile is not None:
        shapes = [(2, 3)[: 2 - len(shape)] + shape for shape in shapes]
    layout = plan_layout([ParamSpec(f"p{i}", s, F32) for i, s in enumerate(shapes)], block=block)
    plan = plan_shard(layout, world_size=world, boundary=boundary)
    torch.manual_seed(world)
    whole = torch.zeros(plan.numel)
    for start, stop in layout.ranges:
        whole[start:stop] = torch.randn(stop - start)
    shards = [whole[start:stop] for start, stop in plan.ranges]
    messages = torch.stack([make_message(s, plan, rank, how) for rank, s in enumerate(shards)])
    assert messages.shape[1] == how.sent_bytes(*plan.most_sent)
    full = torch.full((plan.numel,), torch.nan)
    read_messages(full, messages, plan, how)
    expected = torch.zeros(plan.numel)
    for shape, (start, stop) in zip(shapes, layout.ranges, strict=True):
        own = whole[start:stop].view(shape)
        expected[start:stop] = sent_by_hand.as_sent(own, how).flatten()
    assert torch.equal(full, expected)


def test_ranges_of_one_length_may_have_different_blocks(
    sent_by_hand: SimpleNamespace, parts_of_ranks: Make
) -> None:
    """The second rank's begins with a gap into which the first one's last block reaches."""
    tensors = torch.randn(12), torch.randn(6)
    parts = parts_of_ranks(2, *tensors, boundary="tensor", scaled=HOW)
    assert parts[0].plan.even
    assert parts[0].plan.blocks == ((0, 2), (2, 3))
    _gather(parts)
    for part in parts:
        for leaf, tensor in zip(part.leaves, tensors, strict=True):
            assert torch.equal(leaf.detach(), sent_by_hand.as_sent(tensor, HOW))


@pytest.mark.parametrize("boundary", ["element", "row"])
@pytest.mark.parametrize("param_dtype", [BF16, torch.float16, torch.float64])
def test_leaves_have_the_computing_dtype(
    sent_by_hand: SimpleNamespace, parts_of_ranks: Make, boundary: Any, param_dtype: torch.dtype
) -> None:
    """The product is rounded to it once."""
    precision = MixedPrecision(param_dtype=param_dtype, gather=HOW)
    tensor = torch.randn(9, 7)
    parts = parts_of_ranks(2, tensor, mixed_precision=precision, boundary=boundary, scaled=HOW)
    _gather(parts)
    for part in parts:
        assert part.leaves[0].dtype == param_dtype
        assert torch.equal(part.leaves[0].detach(), sent_by_hand.as_sent(tensor, HOW, param_dtype))


def test_a_gather_is_one_message_and_its_bytes(parts_of_ranks: Make) -> None:
    """64 elements of each rank, and a scale for every eight."""
    parts = parts_of_ranks(2, torch.randn(16, 8), scaled=HOW)
    _gather(parts)
    for part in parts:
        counted = part.comms.gather.log.counts
        assert {kind: (each.calls, each.wire_bytes) for kind, each in counted.items()} == {
            "all_gather": (1, 64 + 8)
        }


def test_whole_memory_comes_with_the_messages_and_goes(
    sent_by_hand: SimpleNamespace, parts_of_ranks: Make
) -> None:
    """Under way there are messages only; what is free is filled again with new values."""
    parts = parts_of_ranks(2, torch.randn(16, 8), scaled=HOW)
    started = [part.start_gather() for part in parts]
    assert [part.full.untyped_storage().nbytes() for part in parts] == [0, 0]
    for pending in started:
        assert pending is not None
        pending.wait()
    assert [part.full.untyped_storage().nbytes() for part in parts] == [512, 512]
    for part in parts:
        part.free()
        part.shard.mul_(3)
    assert [part.full.untyped_storage().nbytes() for part in parts] == [0, 0]
    _gather(parts)
    tripled = torch.cat([part.shard for part in parts]).view(16, 8)
    assert all(
        torch.equal(part.leaves[0].detach(), sent_by_hand.as_sent(tripled, HOW)) for part in parts
    )


def test_one_rank_computes_with_what_many_do(
    sent_by_hand: SimpleNamespace, parts_of_ranks: Make
) -> None:
    """Its whole buffer is not its shard, which keeps its values."""
    tensor = torch.randn(16, 8)
    (part,) = parts_of_ranks(1, tensor, scaled=HOW)
    assert not part.aliased
    _gather([part])
    assert torch.equal(part.leaves[0].detach(), sent_by_hand.as_sent(tensor, HOW))
    assert torch.equal(part.params[0].detach().view(16, 8), tensor)


def test_what_is_written_to_shown_parameters_is_kept_exactly(parts_of_ranks: Make) -> None:
    """And nothing else of the shard changes, though what is shown has been rounded."""
    tensor = torch.randn(16, 8)
    parts = parts_of_ranks(2, tensor, scaled=HOW)
    _gather(parts)
    for part in parts:
        (lent,) = part.lend()
        with torch.no_grad():
            lent[3, 3] = 0.123456789
    for part in parts:
        part.take_writes()
    expected = tensor.clone()
    expected[3, 3] = 0.123456789
    assert torch.equal(torch.cat([part.shard for part in parts]).view(16, 8), expected)
