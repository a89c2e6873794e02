"""A segment as one rank has it, without walking the ranks: held to the plan of all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flat_param import Blocks
from flat_param.layout._options import Precision
from flat_param.plan import ParamSpec, parts_of, plan_shard

BOUNDARIES = ("element", "row", "tensor", Blocks(8))
SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(1, 9)), st.tuples(*[st.integers(1, 9)] * 2)),
    min_size=1,
    max_size=5,
)


def specs_of(shapes, *, requires_grad=True):
    """Parameters with numbers for names."""
    return tuple(
        ParamSpec(str(at), shape, torch.float32, requires_grad=requires_grad)
        for at, shape in enumerate(shapes)
    )


@given(shapes=SHAPES, ways=st.integers(1, 6))
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
def test_ranks_have_what_the_plan_of_all_gives_them(shapes, ways, boundary):
    """Lengths and pieces of parameters."""
    for rank in range(ways):
        for part in parts_of(specs_of(shapes), ways, boundary, rank):
            plan = plan_shard(part.segment.layout, world_size=ways, boundary=boundary)
            assert part.shard_numel == plan.shard_numel
            assert part.used_bytes == 4 * sum(piece.numel for piece in plan.parts(rank))


@given(shapes=SHAPES, ways=st.integers(1, 6))
def test_parameters_are_all_in_some_part(shapes, ways):
    """Each once, in bytes of its dtype."""
    used = [
        part.used_bytes
        for rank in range(ways)
        for part in parts_of(specs_of(shapes), ways, "element", rank)
    ]
    assert sum(used) == sum(spec.numel * 4 for spec in specs_of(shapes))


@pytest.mark.parametrize("ways", [1, 2])
def test_bytes_of_messages_and_buffers(ways):
    """A rank alone computes with its shard."""
    half = Precision(torch.bfloat16, reduce_dtype=torch.float32)
    (part,) = parts_of(specs_of([(8, 8)]), ways, "element", 0)
    assert part.gathered_bytes(Precision()) == (0 if ways == 1 else 64 * 4)
    assert part.gathered_bytes(half) == 64 * 2
    assert part.message_bytes(half) == 64 * 2 // ways
    assert part.whole_grad_bytes(half) == 64 * 4


def test_frozen_parts_have_no_gradients():
    """So none is whole at any time."""
    (part,) = parts_of(specs_of([(8, 8)], requires_grad=False), 2, "element", 0)
    assert part.whole_grad_bytes(Precision()) == 0
