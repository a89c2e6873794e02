from dataclasses import replace
from typing import Any

import torch

from flat_param.plan import ParamSpec, plan_layout, plan_shard

LAYOUT = plan_layout(
    [
        ParamSpec("a", (7, 3), torch.float32),
        ParamSpec("b", (5, 7), torch.float32),
        ParamSpec("c", (5, 5), torch.float32),
    ]
)


def test_element_shards_are_equal_and_aligned():
    """Every rank holds as much as any other and starts at 16 bytes."""
    plan = plan_shard(LAYOUT, world_size=3)
    assert plan.even
    assert all(start % 4 == 0 for start, _ in plan.ranges)
    assert plan.numel >= LAYOUT.numel


def test_row_shards_never_cut_a_row():
    """A part starts and stops at a multiple of the row."""
    plan = plan_shard(LAYOUT, world_size=4, boundary="row")
    for rank in range(4):
        for part in plan.parts(rank):
            row = LAYOUT.specs[part.index].shape[1]
            assert part.start % row == 0
            assert part.stop % row == 0


def test_tensor_shards_hold_whole_tensors_or_nothing():
    """Every part is the whole parameter."""
    plan = plan_shard(LAYOUT, world_size=2, boundary="tensor")
    held = [part.numel for rank in range(2) for part in plan.parts(rank)]
    assert held == [21, 35, 25]


def test_tensor_shards_make_the_longest_range_as_short_as_possible():
    """Of the two ways to cut 24 + 36 + 28, the one with a longest of 59 + gap is worse than 64."""
    plan = plan_shard(LAYOUT, world_size=2, boundary="tensor")
    assert plan.shard_numel == min(max(24, 64), max(59, 29))
    assert plan.imbalance_frac > 0


def test_ranks_beyond_the_data_hold_only_padding():
    """More ranks than elements is a plan, not an error."""
    plan = plan_shard(plan_layout([ParamSpec("w", (3,), torch.float32)]), world_size=4)
    assert [len(plan.parts(rank)) for rank in range(4)] == [1, 0, 0, 0]


def test_a_405b_model_is_planned_for_16384_ranks():
    """A plan costs no memory per element, so any size can be planned anywhere."""
    shapes = [(16384, 16384), (1024, 16384), (53248, 16384), (16384, 53248)]
    specs = [ParamSpec(f"{i}.{s}", s, torch.bfloat16) for i in range(126) for s in shapes]
    plan = plan_shard(plan_layout(specs), world_size=16384, boundary="row")
    assert plan.numel == sum(spec.numel for spec in specs)
    assert plan.imbalance_frac < 0.01


def test_longest_range_is_looked_for_once() -> None:
    """Each of thousands of ranks asks for it thousands of times: once for each padded range."""
    looked: list[int] = []

    class Ranges(tuple[tuple[int, int], ...]):
        def __iter__(self) -> Any:
            looked.append(1)
            return super().__iter__()

    plan = plan_shard(plan_layout([ParamSpec("w", (6, 4), torch.float32)]), world_size=3)
    watched = replace(plan, ranges=Ranges(plan.ranges))
    for _ in range(3):
        assert (watched.shard_numel, watched.even) == (plan.shard_numel, plan.even)
    assert len(looked) == 2
