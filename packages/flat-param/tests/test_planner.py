"""The planner's numbers, derived by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import flat_param
from flat_param import Blocks
from flat_param.plan import (
    ParamSpec,
    TrainingPlan,
    UnitShape,
    plan_segments,
    plan_shard,
    plan_training,
    unit_shapes,
)

BLOCK = UnitShape("block", (ParamSpec("w", (10, 10), torch.float32),))
ROOT = UnitShape("", (ParamSpec("head", (6,), torch.float32),))


def test_mixed_precision_halves_whole_parameters() -> None:
    """Shards stay float32; full parameters are bfloat16."""
    high = plan_training([BLOCK, ROOT], world_size=4)
    low = plan_training([BLOCK, ROOT], world_size=4, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert low.params == high.params
    assert 2 * low.whole_params_peak == high.whole_params_peak


def test_parameters_that_stay_whole_are_summed() -> None:
    """SHARD_GRAD_OP keeps all units whole, FULL_SHARD the outermost and the two largest inside."""
    small, large = (UnitShape(n, (ParamSpec("w", (s,), torch.float32),)) for n, s in _SIZES)
    units = [small, BLOCK, large, ROOT]
    kept = plan_training(units, world_size=4, reshard_after_forward=False)
    freed = plan_training(units, world_size=4)
    whole = {"small": 4 * 4, "block": 4 * 28, "large": 4 * 52, "": 4 * 4}
    assert kept.whole_params_peak == 4 * sum(whole.values())
    assert freed.whole_params_peak == 4 * (whole[""] + whole["large"] + whole["block"])
    assert freed.whole_grads_peak == freed.whole_params_peak


_SIZES = (("small", 16), ("large", 200))


def test_frozen_parameters_need_neither_gradients_nor_state() -> None:
    """Only shards and full parameters."""
    frozen = UnitShape("block", (ParamSpec("w", (10, 10), torch.float32, requires_grad=False),))
    plan = plan_training([frozen, ROOT], world_size=4)
    assert plan.params == (28 + 4) * 4
    assert plan.grads == 4 * 4
    assert plan.optimizer == 2 * 4 * 4
    assert plan.whole_grads_peak == 4 * 4 * 4


def test_one_rank_that_computes_in_another_dtype_has_whole_buffers() -> None:
    """100 and 8 numbers of two bytes, beside the shards."""
    plan = plan_training([BLOCK, ROOT], world_size=1, mp_policy=MixedPrecisionPolicy(torch.half))
    assert plan.whole_params_peak == (100 + 8) * 2


def test_gradients_are_summed_in_the_reduce_dtype() -> None:
    """They are kept in the parameters' dtype."""
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float64)
    plan = plan_training([BLOCK, ROOT], world_size=4, mp_policy=precision)
    assert plan.grads == (28 + 4) * 4
    assert plan.whole_grads_peak == 4 * (28 + 4) * 8


def test_units_are_divided_as_by_nested_calls() -> None:
    """Inner units take their parameters, and the root has the rest."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    shapes = unit_shapes(model, units=nn.Linear)
    names = [[spec.name for spec in shape.specs] for shape in shapes]
    assert [shape.name for shape in shapes] == ["0", "1.0", ""]
    assert names == [["weight", "bias"], ["weight", "bias"], ["1.1.weight", "1.1.bias"]]


def test_nothing_to_plan_is_refused() -> None:
    """A plan needs a unit."""
    with pytest.raises(flat_param.LayoutError, match="units is empty"):
        plan_training([], world_size=2)


@pytest.mark.parametrize("count", [0, -1, "2", 2.0])
@pytest.mark.parametrize("name", ["world_size", "microbatches"])
def test_number_of_ranks_is_one(name: str, count: Any) -> None:
    """Whichever of the two is none is named."""
    given = {"world_size": 2, name: count}
    with pytest.raises(
        flat_param.LayoutError, match=f"{name} is {count!r}, but it must be a whole number"
    ):
        plan_training([ROOT], **given)


def test_microbatches_keep_gradients_of_all_units() -> None:
    """They wait for the last one."""
    one, four = (
        plan_training([BLOCK, BLOCK, BLOCK, ROOT], world_size=4, microbatches=m) for m in (1, 4)
    )
    assert one.whole_grads_peak == 4 * (2 * 28 + 4) * 4
    assert four.whole_grads_peak == 4 * (3 * 28 + 4) * 4


@pytest.mark.parametrize("boundary", ["element", "row", "tensor", Blocks(7)])
@pytest.mark.parametrize("world", [1, 2, 3, 8, 40])
def test_longest_shard_is_planned(boundary: Any, world: int) -> None:
    """Bytes are those of the longest range of `plan_shard`."""
    specs = (ParamSpec("w", (9, 11), torch.float32), ParamSpec("b", (13,), torch.float32))
    cut = plan_shard(plan_segments(specs)[0].layout, world_size=world, boundary=boundary)
    plan = plan_training(
        [UnitShape("", specs)], world_size=world, boundary=boundary, state_tensors=1
    )
    assert plan.params == plan.optimizer == 4 * cut.shard_numel


def test_plan_prints_bytes_by_kind() -> None:
    """A line for each kind of memory, and one of their total."""
    gib = 2**30
    plan = TrainingPlan(gib, 2 * gib, 4 * gib, whole_params_peak=8 * gib, whole_grads_peak=gib // 2)
    assert str(plan).splitlines() == [
        "params                   1.0000 GiB",
        "grads                    2.0000 GiB",
        "optimizer                4.0000 GiB",
        "whole_params_peak        8.0000 GiB",
        "whole_grads_peak         0.5000 GiB",
        "total                   15.5000 GiB",
    ]
