"""Natural mistakes are answered with what to pass instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flat_param
from flat_param import fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")

MODULE_FIRST = "but it must be an instance of nn.Module. Pass the module as the first argument"
NO_OPTIMIZER = "Pass the optimizer itself, not its class or its state_dict()"


@torch.inference_mode()
def _shard_in_inference_mode() -> None:
    fully_shard(nn.Linear(2, 2))


def _step_copies(module: Any) -> None:
    with module.whole_params():
        optimizer = torch.optim.SGD(module.parameters())
    optimizer.step()


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
    "state without groups": (
        lambda m: flat_param.load_full_state_dict(
            m,
            {"model": m.state_dict(), "optim": {"state": {}}},
            optimizer=torch.optim.SGD(m.parameters()),
        ),
        "the optimizer state has no 'param_groups'",
    ),
    "clip parameters": (
        lambda m: m.clip_grad_norm_(m.parameters(), 1.0),
        "The module's own method takes no parameters",
    ),
    "offload in half buckets": (
        lambda m: flat_param.offload_optimizer(torch.optim.SGD(m.parameters()), bucket_numel=0.5),
        "Pass a whole number above 0",
    ),
    "divide by nothing": (
        lambda m: m.set_gradient_divide_factor(0),
        "factor is 0, but sums are divided by it",
    ),
    "divide by a text": (lambda m: m.set_gradient_divide_factor("2"), "Pass a number above 0"),
    "DDP around it": (nn.parallel.DistributedDataParallel, "Leave DDP out, since backward"),
    "shard without shapes": (lambda _: fully_shard(nn.LazyLinear(2)), "Run one forward first"),
    "shard in inference mode": (lambda _: _shard_in_inference_mode(), "use torch.no_grad() there"),
    "step copies": (
        lambda m: _step_copies(m),
        "leave whole_params(), before the optimizer is made",
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


WRONG_FLAT_CALLS: dict[str, tuple[Any, str]] = {
    "align to a text": (
        lambda _: flat_param.flatten(nn.Linear(2, 2), align_bytes="16"),
        "align_bytes is '16', but it must be a power of two",
    ),
    "unflatten a view": (flat_param.unflatten, MODULE_FIRST),
    "view of a view": (flat_param.flat_params_of, MODULE_FIRST),
    "load a list": (lambda flat: flat.load_vector([1.0]), "is of type list, but segment 'float32'"),
    "call with a state dict": (
        lambda flat: flat.functional_call(flat.module.state_dict(), torch.ones(1, 2)),
        "a vector is of type OrderedDict, but segment 'float32'",
    ),
    "clip to a text": (lambda flat: flat.clip_("1"), "max_norm is '1', but"),
    "clip below zero": (lambda flat: flat.clip_(-1.0), "Pass a number such as 1.0"),
    "average a module": (
        lambda flat: flat.lerp_(flat.module, 0.1),
        "Pass what flatten returned, or flat_params_of(module)",
    ),
    "load state swapped": (
        lambda flat: flat.load_optimizer_state({}, torch.optim.SGD(flat.chunks())),
        NO_OPTIMIZER,
    ),
    "load state of a model": (
        lambda flat: flat.load_optimizer_state(
            torch.optim.SGD(flat.chunks()), flat.module.state_dict()
        ),
        "which has the keys 'state' and 'param_groups'",
    ),
    "convert a state": (lambda flat: flat.optimizer_state({"state": {}}), NO_OPTIMIZER),
}


@pytest.mark.parametrize(("call", "text"), WRONG_FLAT_CALLS.values(), ids=WRONG_FLAT_CALLS)
def test_wrong_calls_of_flat_views_say_what_to_pass(call: Any, text: str) -> None:
    """In an error of this package, with a sentence to act on, and parameters keep their values."""
    module = nn.Sequential(nn.Linear(2, 2))
    flat = flat_param.flatten(module)
    before = flat.as_vector().clone()
    with pytest.raises(flat_param.FlatParamError, match=re.escape(text)):
        call(flat)
    assert torch.equal(flat.as_vector(), before)


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
