"""What `fully_shard` is given is looked at first and refused in words; nothing has changed then."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import flat_param
from flat_param import LayoutError, ParameterError, ShardedModule, StateError, fully_shard
from flat_param.layout._options import Precision

pytestmark = pytest.mark.usefixtures("group_of_one")

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "precision": (
        {"mp_policy": torch.bfloat16},
        StateError,
        "mp_policy is torch.bfloat16, but it must be a policy of torch",
    ),
    "dtype": (
        {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.int64)},
        LayoutError,
        "output_dtype of mp_policy is torch.int64, but torch computes in floating point",
    ),
    "small dtype": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)},
        LayoutError,
        "param_dtype of mp_policy is torch.float8_e4m3fn, but torch computes in floating point",
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
    "mesh": ({"mesh": 2}, StateError, "mesh is 2, but it must be a DeviceMesh"),
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


MODULE_FIRST = "but it must be an instance of nn.Module. Pass the module as the first argument"
NO_OPTIMIZER = "Pass the optimizer itself, not its class or its state_dict()"
WRONG_CALLS: dict[str, tuple[Any, str]] = {
    "flatten parameters": (lambda m: flat_param.flatten(m.parameters()), MODULE_FIRST),
    "save a state dict": (lambda m: flat_param.save_sharded(m.state_dict(), "x"), MODULE_FIRST),
    "save swapped": (lambda m: flat_param.save_sharded("x", m), MODULE_FIRST),
    "save to nothing": (lambda m: flat_param.save_sharded(m, None), "path is of type NoneType"),
    "load swapped": (lambda m: flat_param.load_sharded("x", m), MODULE_FIRST),
    "load a state dict": (
        lambda m: flat_param.load_sharded(m, m.state_dict()),
        "path is of type OrderedDict, but it must be the path of a checkpoint",
    ),
    "load from nowhere": (lambda m: flat_param.load_sharded(m, "/nowhere"), "does not exist"),
    "class of an optimizer": (
        lambda m: flat_param.load_full_state_dict(
            m, {"model": m.state_dict(), "optim": {}}, optimizer=torch.optim.SGD
        ),
        NO_OPTIMIZER,
    ),
    "state of an optimizer": (
        lambda m: flat_param.full_state_dict(
            m, optimizer=torch.optim.SGD(m.parameters()).state_dict()
        ),
        NO_OPTIMIZER,
    ),
    "whole state of a path": (
        lambda m: flat_param.load_full_state_dict(m, "x"),
        "state is a str, but it must be a state dict",
    ),
    "positions of a model": (
        lambda m: flat_param.optimizer_state_by_position(flat_param.full_state_dict(m)),
        "Pass full_state_dict(module, optimizer=...)['optim']",
    ),
    "clip parameters": (
        lambda m: m.clip_grad_norm_(m.parameters(), 1.0),
        "The module's own method takes no parameters",
    ),
    "offload in half buckets": (
        lambda m: flat_param.offload_optimizer(torch.optim.SGD(m.parameters()), bucket_numel=0.5),
        "Pass a whole number above 0",
    ),
    "plan a model": (
        lambda m: flat_param.plan.plan_training(m, world_size=2),
        "Pass unit_shapes(module, units=...)",
    ),
    "units by name": (
        lambda m: flat_param.plan.unit_shapes(m, units="Linear"),
        "units is 'Linear', but it must be a class of modules",
    ),
}


@pytest.mark.parametrize(("call", "text"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls_say_what_to_pass(call: Any, text: str) -> None:
    """In an error of this package, with a sentence to act on."""
    module = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(flat_param.FlatParamError, match=re.escape(text)):
        call(module)


def test_save_to_a_file_is_refused(tmp_path: Path) -> None:
    """Nothing that was there is touched."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(flat_param.CheckpointError, match=r"Not a directory.*another path"):
        flat_param.save_sharded(fully_shard(nn.Linear(2, 2)), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ([], "the list of modules is empty"),
        ([LINEAR, LINEAR], "a Linear of the list is inside another module of the list"),
        ([LINEAR, nn.Sequential(LINEAR)], "a Linear of the list is inside another module"),
        ([LINEAR, torch.ones(2)], "module is of type Tensor, but it must be a module or a list"),
        (torch.ones(2), "module is of type Tensor, but it must be a module or a list of modules"),
        (nn.Linear, "module is the class Linear, but it must be a module or a list of modules"),
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
    module = fully_shard(nn.Linear(2, 2), mp_policy=None)
    assert module._flat_param.options.precision == Precision()


def test_policy_of_fsdp2_says_the_same() -> None:
    """All four of its fields."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, False)
    module = fully_shard(nn.Linear(2, 2), mp_policy=policy)
    expected = Precision(torch.bfloat16, torch.float32, torch.float64, cast_forward_inputs=False)
    assert module._flat_param.options.precision == expected


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


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_meshes_of_one_rank_shard_nothing(shape: tuple[int, ...]) -> None:
    """Parameters keep their shape."""
    module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", shape))
    assert module.weight.shape == (2, 2)
    assert module._flat_param.comms.world_size == 1


def test_list_becomes_one_unit() -> None:
    """It is returned, and its modules share a unit."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert fully_shard(layers) is layers
    assert layers[0]._flat_param is layers[1]._flat_param
    assert all(isinstance(layer, ShardedModule) for layer in layers)
    layers[1](layers[0](torch.ones(1, 2))).sum().backward()
    assert all(layer.weight.grad is not None for layer in layers)
