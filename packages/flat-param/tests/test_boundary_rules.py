"""A boundary for each parameter, by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from flat_param import LayoutError, by_name, fully_shard
from flat_param.plan import plan_training, unit_shapes


@contextmanager
def first_of(world: int) -> Iterator[None]:
    """The first rank of a group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model.register_module("tied", nn.Linear(4, 6, bias=False))
    model.tied.weight = model[0].weight
    return model


def _pieces(boundary: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of what the first of two ranks has."""
    with first_of(2):
        model = fully_shard(_model(), boundary=boundary)
        return {name: tuple(param.shape) for name, param in model.named_parameters()}


def test_first_rule_that_fits_decides() -> None:
    """What none fits has the default; one boundary for all is that boundary."""
    for rules in (by_name({"*": "row"}), by_name({}, default="row")):
        assert _pieces(rules) == _pieces("row")
    mixed = _pieces(by_name({"0.*": "tensor", "*": "row"}))
    assert mixed["0.weight"] == (6, 4)
    assert _pieces(by_name({"0.weight": "row", "0.*": "tensor"}))["0.weight"][1:] == (4,)


def test_each_name_of_a_tied_parameter_counts() -> None:
    """It lies in the buffer once."""
    assert _pieces(by_name({"tied.*": "tensor"}))["0.weight"] in ((6, 4), (0, 4))


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            by_name({"0.weigth": "tensor"}),
            r"'0.weigth', but no parameter .* There are 0.weight, tied.weight, ",
        ),
        (by_name({"x*": "tensor"}), r"'x\*', but no parameter"),
        ({"0": "row"}, r"boundary is .*{'0': 'row'}.* or what by_name returns"),
    ],
)
def test_rule_that_fits_nothing_is_a_mistake(rules: Any, says: str) -> None:
    """With what was meant; names alone could be of parameters or of modules."""
    with pytest.raises(LayoutError, match=says):
        _pieces(rules)


def test_rule_may_fit_nothing_where_it_is_said() -> None:
    """`missing_ok=True`."""
    assert _pieces(by_name({"x*": "tensor"}, missing_ok=True)) == _pieces("element")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: by_name({nn.Linear: "row"}), "by_name: rules .* mapping from globs of names"),  # type: ignore[dict-item]
        (lambda: by_name("*"), "by_name: rules is '\\*'"),  # type: ignore[arg-type]
        (lambda: by_name({"*": "column"}), "by_name: boundary is 'column'"),  # type: ignore[dict-item]
        (lambda: by_name({}, default="column"), "by_name: boundary is 'column'"),  # type: ignore[arg-type]
    ],
)
def test_bad_rules_are_refused(make: Callable[[], object], says: str) -> None:
    """When they are made."""
    with pytest.raises(LayoutError, match=says):
        make()


def test_plan_for_later_takes_names() -> None:
    """It knows shapes; what one unit lacks another has."""
    shapes = unit_shapes(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), units=nn.Linear)
    even = plan_training(shapes, world_size=4)
    whole = plan_training(shapes, world_size=4, boundary=by_name({"weight": "tensor"}))
    assert whole.params > even.params
