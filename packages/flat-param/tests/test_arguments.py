"""What `fully_shard` is given is looked at first and refused in words; nothing has changed then."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from flat_param import (
    LayoutError,
    MixedPrecision,
    ParameterError,
    StateError,
    Strategy,
    fully_shard,
)

pytestmark = pytest.mark.usefixtures("group_of_one")

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "strategy": ({"strategy": "full_shard"}, LayoutError, "strategy is 'full_shard', but it must"),
    "precision": (
        {"mixed_precision": torch.bfloat16},
        StateError,
        "mixed_precision is torch.bfloat16, but it has a dtype for each purpose",
    ),
    "policy": (
        {"mp_policy": MixedPrecision()},
        StateError,
        "but it has a dtype for each purpose. Pass torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    "two precisions": (
        {"mp_policy": MixedPrecisionPolicy(), "mixed_precision": MixedPrecision()},
        StateError,
        "both mp_policy and mixed_precision are given",
    ),
    "offload": (
        {"offload_policy": "cpu"},
        StateError,
        "offload_policy is 'cpu', but it says where shards are kept",
    ),
    "placement": (
        {"shard_placement_fn": lambda param: None},
        StateError,
        "shard_placement_fn is given, but shards are ranges of a flat buffer",
    ),
    "mesh": ({"mesh": 2}, StateError, "mesh is 2, but it says which ranks share parameters"),
    "init": ({"init_fn": "zeros"}, StateError, "init_fn is 'zeros', but it is called with each"),
    "freeing": (
        {"reshard_after_forward": "no"},
        StateError,
        "a unit is told 'no', but it is freed after forward, or a number of ranks keep it whole",
    ),
    "half a rank": ({"reshard_after_forward": 0.5}, StateError, "a unit is told 0.5, but it is"),
    "ignored": (
        {"ignored_params": nn.Parameter(torch.ones(2, 2))},
        ParameterError,
        "ignored_params has a Tensor, but it must be a set of parameters",
    ),
}


@pytest.mark.parametrize(("given", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_by_name(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Each says what it is instead."""
    module = nn.Linear(2, 2)
    with pytest.raises(error, match=re.escape(text)):
        fully_shard(module, **given)
    assert type(module) is nn.Linear


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ([nn.Linear(2, 2)], "module is a list, but it must be one module"),
        (torch.ones(2), "module is a Tensor, but it must be one module"),
        (nn.Linear, "module is Linear, but it must be one module"),
        (nn.ModuleList([nn.Linear(2, 2)]), "ModuleList has no forward"),
        (nn.ParameterDict({"a": torch.ones(2)}), "ParameterDict has no forward"),
    ],
)
def test_what_is_never_called_is_no_unit(module: Any, text: str) -> None:
    """Its parameters would be whole at no time."""
    with pytest.raises(StateError, match=re.escape(text)):
        fully_shard(module)


def test_container_that_is_called_is_a_unit() -> None:
    """One with a forward of its own."""

    class Sum(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([each(x) for each in self]).sum(0)

    assert fully_shard(Sum([nn.Linear(2, 2)]))(torch.ones(1, 2)).shape == (1, 2)


def test_gradient_of_the_whole_parameter_is_refused() -> None:
    """A step would add it to a piece; it stays as it is."""
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ParameterError, match=r"'weight' has a gradient .* Call zero_grad\(\)"):
        fully_shard(module)
    assert module.weight.grad is not None
    module.zero_grad()
    fully_shard(module)


def test_precision_may_be_left_out() -> None:
    """Everything keeps its dtype."""
    module = fully_shard(nn.Linear(2, 2), mixed_precision=None)
    assert module._flat_param.options.mixed_precision == MixedPrecision()


def test_policy_of_fsdp2_says_the_same() -> None:
    """All four of its fields."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, False)
    module = fully_shard(nn.Linear(2, 2), mp_policy=policy)
    expected = MixedPrecision(
        torch.bfloat16, torch.float32, cast_forward_inputs=False, output_dtype=torch.float64
    )
    assert module._flat_param.options.mixed_precision == expected


@pytest.mark.parametrize(
    ("policy", "offloads", "pins"),
    [
        (CPUOffloadPolicy(), True, True),
        (CPUOffloadPolicy(pin_memory=False), True, False),
        (OffloadPolicy(), False, False),
    ],
)
def test_offload_policy_of_fsdp2_says_the_same(policy: Any, offloads: bool, pins: bool) -> None:
    """Where shards are, and whether they are page-locked."""
    options = fully_shard(nn.Linear(2, 2), offload_policy=policy)._flat_param.options
    assert (options.cpu_offload, options.pin_memory) == (offloads, pins)


@pytest.mark.parametrize(
    ("shape", "strategy"), [((1,), Strategy.FULL_SHARD), ((1, 1), Strategy.HYBRID_SHARD)]
)
def test_mesh_says_the_strategy(shape: tuple[int, ...], strategy: Strategy) -> None:
    """One with two axes has copies."""
    module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", shape))
    assert module._flat_param.options.strategy is strategy
