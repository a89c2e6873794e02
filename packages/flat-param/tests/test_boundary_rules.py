"""A boundary for each parameter, by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flat_param import Blocks, LayoutError, by_name
from flat_param.layout._boundary import PerParameter
from flat_param.layout._boundary_rules import resolve
from flat_param.plan import (
    ParamSpec,
    collect_params,
    plan_layout,
    plan_shard,
    plan_training,
    unit_shapes,
)


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model.register_module("tied", nn.Linear(4, 6, bias=False))
    model.tied.weight = model[0].weight
    return model


def _chosen(rules: Any) -> dict[str, Any]:
    model = _model()
    specs, _ = collect_params(model)
    found = resolve(rules, specs)
    assert isinstance(found, PerParameter)
    return dict(found.choices)


def test_first_rule_that_fits_decides() -> None:
    """What none fits has the default."""
    assert _chosen(by_name({"0.*": "tensor", "*.weight": Blocks(8)}, default="row")) == {
        "0.weight": "tensor",
        "0.bias": "tensor",
        "1.weight": Blocks(8),
        "1.bias": "row",
        "2.weight": Blocks(8),
        "2.bias": "row",
    }


def test_each_name_of_a_tied_parameter_counts() -> None:
    """It lies in the buffer once."""
    assert _chosen(by_name({"tied.*": "tensor"}))["0.weight"] == "tensor"


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            by_name({"0.weigth": "tensor"}),
            r"'0.weigth', but no parameter .* Did you mean '0.weight'",
        ),
        (by_name({"x*": "tensor"}), r"'x\*', but no parameter .* There are 0.weight, 0.bias"),
    ],
)
def test_rule_that_fits_nothing_is_a_mistake(rules: Any, says: str) -> None:
    """With what was meant; unless that was said to be fine."""
    with pytest.raises(LayoutError, match=says):
        _chosen(rules)


def test_rule_that_may_fit_nothing() -> None:
    """`missing_ok=True`."""
    rules = by_name({"x*": "tensor"}, missing_ok=True)
    assert set(_chosen(rules).values()) == {"element"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: by_name({nn.Linear: "row"}), "by_name: rules .* mapping from globs of names"),  # type: ignore[dict-item]
        (lambda: by_name("*"), "by_name: rules is '\\*'"),  # type: ignore[arg-type]
        (lambda: by_name({"*": "column"}), "by_name: boundary is 'column'"),  # type: ignore[dict-item]
        (lambda: by_name({}, default="column"), "by_name: boundary is 'column'"),  # type: ignore[arg-type]
    ],
)
def test_bad_rules_are_refused(make: Any, says: str) -> None:
    """When they are made."""
    with pytest.raises(LayoutError, match=says):
        make()


def test_mapping_alone_is_refused() -> None:
    """The message names the function that makes rules of it."""
    with pytest.raises(LayoutError, match=r"boundary is the mapping {'0': 'row'}. Pass .*by_name"):
        _chosen({"0": "row"})  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=5),
    world_size=st.integers(1, 5),
    data=st.data(),
)
def test_each_parameter_is_cut_by_its_own_boundary(
    shapes: list[list[int]], world_size: int, data: st.DataObject
) -> None:
    """As a plan of this parameter alone may cut it; ranges cover the buffer."""
    kinds = st.sampled_from(["element", "row", "tensor", Blocks(3)])
    specs = [ParamSpec(f"p{i}", tuple(s), torch.float32) for i, s in enumerate(shapes)]
    each = PerParameter(tuple((spec.name, data.draw(kinds)) for spec in specs))
    layout = plan_layout(specs)
    plan = plan_shard(layout, world_size=world_size, boundary=each)
    assert plan.ranges[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(plan.ranges, plan.ranges[1:], strict=False))
    assert plan.ranges[-1][1] >= layout.numel
    for rank in range(world_size):
        for part in plan.parts(rank):
            spec, (_, own) = specs[part.index], each.choices[part.index]
            row = spec.numel // spec.shape[0] if len(spec.shape) > 1 else 1
            atom = {"element": 1, "row": row, "tensor": spec.numel, Blocks(3): 3}[own]
            assert part.start % atom == 0
            assert part.stop % atom == 0 or part.stop == spec.numel


def test_one_boundary_for_all_is_that_boundary() -> None:
    """A buffer of element-wise parameters is cut evenly, whatever others have."""
    specs = [ParamSpec(name, (5,), torch.float32) for name in "ab"]
    each = PerParameter((("a", "element"), ("b", "element"), ("c", "tensor")))
    plan = plan_shard(plan_layout(specs), world_size=2, boundary=each)
    assert plan.boundary == "element"
    assert plan.even


def test_plan_takes_rules_that_match_in_some_units() -> None:
    """A name that one unit lacks is in another."""
    shapes = unit_shapes(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), units=nn.Linear)
    even = plan_training(shapes, world_size=4)
    whole = plan_training(shapes, world_size=4, boundary=by_name({"weight": "tensor"}))
    assert whole.rank_bytes.params > even.rank_bytes.params
