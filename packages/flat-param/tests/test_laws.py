"""Laws that hold for any parameters: round trips, exact partitions, conservation."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flat_param import Blocks, flatten
from flat_param.layout._spec import dense_stride
from flat_param.plan import ParamSpec, plan_layout, plan_segments, plan_shard

FEW = settings(max_examples=40, deadline=None, derandomize=True)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
boundaries = st.sampled_from(["element", "row", "tensor", Blocks(3), Blocks((2, 2))])


@st.composite
def layouts(draw):
    """Some parameters of one dtype, at some alignment."""
    dtype = draw(dtypes)
    chosen = draw(st.lists(shapes, min_size=1, max_size=6))
    specs = [ParamSpec(str(index), shape, dtype) for index, shape in enumerate(chosen)]
    return plan_layout(specs, align_bytes=draw(st.sampled_from([1, 16, 128])))


@st.composite
def modules(draw):
    """Parameters of any shape, permuted stride, dtype and trainability."""
    module = nn.Module()
    for index, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=5))):
        order = draw(st.permutations(range(len(shape))))
        values = torch.randn(shape).permute(order).to(draw(dtypes))
        module.register_parameter(f"p{index}", nn.Parameter(values, draw(st.booleans())))
    return module


@FEW
@given(layouts())
def test_parameters_and_gaps_partition_the_buffer(layout):
    """Every element is in exactly one parameter or one gap, and starts are aligned."""
    owned = sorted((*layout.ranges, *layout.gaps))
    seen = [element for start, stop in owned for element in range(start, stop)]
    assert seen == list(range(layout.numel))
    assert all(offset % layout.align_numel == 0 for offset in layout.offsets)


@FEW
@given(layouts(), st.integers(1, 9), boundaries)
def test_shards_partition_the_buffer(layout, world_size, boundary):
    """Ranges follow one another, and every element of every parameter is on one rank."""
    plan = plan_shard(layout, world_size=world_size, boundary=boundary)
    edges = [edge for pair in plan.ranges for edge in pair]
    assert edges[0] == 0
    assert edges[1:-1:2] == edges[2::2]
    assert plan.numel >= layout.numel
    held = [p for rank in range(world_size) for p in plan.parts(rank)]
    assert sum(part.numel for part in held) == layout.used_numel


@FEW
@given(layouts(), st.integers(1, 9), boundaries)
def test_parts_lie_where_they_say(layout, world_size, boundary):
    """A part's offset in the shard and its place in the parameter name the same element."""
    plan = plan_shard(layout, world_size=world_size, boundary=boundary)
    for rank, (start, stop) in enumerate(plan.ranges):
        for part in plan.parts(rank):
            assert start + part.offset == layout.offsets[part.index] + part.start
            assert start + part.offset + part.numel <= stop


@FEW
@given(shapes, st.data())
def test_dense_stride_is_dense_and_stable(shape, data):
    """Any stride becomes one that fills memory, and such a one stays."""
    stride = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    dense = dense_stride(shape, stride)
    assert dense_stride(shape, dense) == dense
    if 0 not in shape:
        last = sum((size - 1) * step for size, step in zip(shape, dense, strict=True))
        assert last + 1 == torch.Size(shape).numel()


@FEW
@given(modules())
def test_flatten_changes_no_value_stride_or_identity(module):
    """Any module comes out of `flatten` as it went in, in one buffer per segment."""
    before = [(p, p.detach().clone(), p.stride()) for p in module.parameters()]
    flat = flatten(module)
    for (param, value, stride), now in zip(before, module.parameters(), strict=True):
        assert param is now
        assert torch.equal(param, value)
        assert param.stride() == stride
    assert sum(layout.used_numel for layout in flat.layouts.values()) == sum(
        p.numel() for p in module.parameters()
    )


@FEW
@given(modules())
def test_vectors_round_trip(module):
    """Loading a segment's vector into a copy gives the same parameters and clean gaps."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    flat, other = flatten(module), flatten(twin)
    for name, layout in flat.layouts.items():
        noisy = flat.as_vector(name).clone()
        for start, stop in layout.gaps:
            noisy[start:stop] = 1
        other.load_vector(noisy, name)
        assert torch.equal(other.as_vector(name), flat.as_vector(name))


@FEW
@given(st.lists(st.tuples(shapes, dtypes, st.booleans()), min_size=1, max_size=8))
def test_segments_hold_every_parameter_once(kinds):
    """Grouping loses and repeats nothing, and keeps the order within a group."""
    specs = [ParamSpec(str(i), *kind[:2], requires_grad=kind[2]) for i, kind in enumerate(kinds)]
    segments = plan_segments(specs)
    names = [spec.name for segment in segments for spec in segment.layout.specs]
    assert sorted(names) == sorted(spec.name for spec in specs)
    assert len({segment.name for segment in segments}) == len(segments)
