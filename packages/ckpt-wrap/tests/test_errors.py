"""Every error message names the function, the module, the accepted values and the remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import ckpt_wrap
from ckpt_wrap import (
    CkptWrapError,
    ModuleError,
    OffloadError,
    OptionError,
    PolicyError,
    RecomputeError,
    apply_activation_checkpointing,
    checkpoint_,
    checkpoint_layers_,
    checkpoint_wrapper,
    clean_state_dict,
    offload_,
    offload_stats,
    offload_wrapper,
    unwrap,
)


class Final(nn.Module):
    def __init_subclass__(cls) -> None:
        raise ValueError("no heirs")

    def forward(self, x):
        return x


class OnlyHolds(nn.Module):
    """A user-defined container without a forward."""


CONTAINERS = {
    "ModuleList": lambda: nn.ModuleList([nn.ReLU()]),
    "ModuleDict": nn.ModuleDict,
    "ParameterList": nn.ParameterList,
    "OnlyHolds": OnlyHolds,
}


def _sequential():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


MODULE = "module is None of type NoneType, but it must be an nn.Module. Pass the module itself."
CASES = {
    "checkpoint_": (lambda: checkpoint_(None), ModuleError, f"checkpoint_: {MODULE}"),
    "offload_": (lambda: offload_(None), ModuleError, f"offload_: {MODULE}"),
    "unwrap": (lambda: unwrap(None), ModuleError, f"unwrap: {MODULE}"),
    "stats": (lambda: offload_stats(None), ModuleError, f"offload_stats: {MODULE}"),
    "checkpoint_wrapper": (
        lambda: checkpoint_wrapper(None),
        ModuleError,
        f"CheckpointWrapper: {MODULE}",
    ),
    "offload_wrapper": (lambda: offload_wrapper(None), ModuleError, f"OffloadWrapper: {MODULE}"),
    "list of modules": (
        lambda: checkpoint_([]),
        ModuleError,
        "checkpoint_: module is [] of type list, but it must be an nn.Module. Call it for each "
        "module.",
    ),
    **{
        f"container {kind}": (
            lambda kind=kind: offload_(CONTAINERS[kind]()),
            ModuleError,
            f"offload_: module {kind} has no forward, but only a module that is called can be "
            "checkpointed or offloaded. Wrap its items instead, one by one.",
        )
        for kind in CONTAINERS
    },
    "compiled": (
        lambda: checkpoint_(torch.compile(nn.ReLU(), backend="eager")),
        ModuleError,
        "checkpoint_: module OptimizedModule is compiled, but it is the module inside "
        "that must be changed. Call this before torch.compile, or on its _orig_mod.",
    ),
    "final": (
        lambda: offload_(Final()),
        ModuleError,
        "offload_: module Final cannot be subclassed (no heirs), but a subclass of its class is "
        "made for it. Use checkpoint_wrapper or offload_wrapper.",
    ),
    "lazy": (
        lambda: checkpoint_(nn.LazyLinear(2)),
        ModuleError,
        "checkpoint_: module LazyLinear is lazy, but it must have its parameters, as it changes "
        "its class when it gets them. Run one forward first.",
    ),
    "impl": (
        lambda: checkpoint_wrapper(nn.ReLU(), "REENTRANT"),
        OptionError,
        "checkpoint_wrapper: option 'checkpoint_impl' is 'REENTRANT', but it must be a "
        "CheckpointImpl. Pass CheckpointImpl.NO_REENTRANT.",
    ),
    "unknown": (
        lambda: checkpoint_(nn.ReLU(), policy=3),
        OptionError,
        "checkpoint_: option 'policy' needs checkpoint_fn=, which receives it; options without it "
        "are use_reentrant, preserve_rng_state, context_fn, determinism_check, early_stop, debug. "
        "For a policy of sac-policies, pass checkpoint_fn=sac_policies.checkpoint.",
    ),
    "debug": (
        lambda: checkpoint_wrapper(nn.ReLU(), debug=True),
        OptionError,
        "checkpoint_wrapper: option 'debug' is True, but only torch's checkpoint prints the "
        "operators of both runs. Pass checkpoint_fn=torch.utils.checkpoint.checkpoint, "
        "use_reentrant=False with it.",
    ),
    "a number for a bool": (
        lambda: checkpoint_wrapper(nn.ReLU(), early_stop=0),
        OptionError,
        "checkpoint_wrapper: option 'early_stop' is 0, but it must be a bool. Pass True or False.",
    ),
    "one context": (
        lambda: checkpoint_(nn.ReLU(), context_fn=lambda: None)(torch.ones(2)),
        OptionError,
        "checkpoint_: option 'context_fn' returned None for module ReLU, but it must return two "
        "context managers. Return one for forward and one for recomputation.",
    ),
    "determinism_check": (
        lambda: checkpoint_(nn.ReLU(), determinism_check="nope"),
        OptionError,
        "checkpoint_: option 'determinism_check' is 'nope', but it must be 'default' or "
        "'none'. Pass one of them.",
    ),
    "context_fn": (
        lambda: checkpoint_(nn.ReLU(), context_fn=3),
        OptionError,
        "checkpoint_: option 'context_fn' is 3, but it must be a function that returns "
        "two context managers. Pass such a function.",
    ),
    "checkpoint_fn": (
        lambda: checkpoint_(nn.ReLU(), checkpoint_fn=3),
        OptionError,
        "checkpoint_: option 'checkpoint_fn' is 3, but it must be a function called as "
        "checkpoint_fn(function, *args, **kwargs). Pass such a function.",
    ),
    "offload to a folder that is not there": (
        lambda: offload_(nn.ReLU(), to="cuda:0"),
        OptionError,
        "offload_: option 'to' is 'cuda:0', but it must be 'cpu' for host memory, or the path of "
        "a folder that exists. Make the folder first.",
    ),
    "offload to a file": (
        lambda: offload_(nn.ReLU(), to=__file__),
        OptionError,
        f"offload_: option 'to' is '{__file__}', but it must be 'cpu' for host memory, or the path "
        "of a folder that exists. Make the folder first.",
    ),
    "offload to nothing": (
        lambda: offload_(nn.ReLU(), to=""),
        OptionError,
        "offload_: option 'to' is '', but it must be 'cpu' for host memory, or the path of a "
        "folder that exists. Make the folder first.",
    ),
    "apply to None": (
        lambda: apply_activation_checkpointing(None),
        ModuleError,
        f"apply_activation_checkpointing: {MODULE}",
    ),
    "apply a name": (
        lambda: apply_activation_checkpointing(_sequential(), check_fn="ReLU"),
        PolicyError,
        "apply_activation_checkpointing: option 'check_fn' is 'ReLU', but it must be a "
        "function of a module. Pass such a function.",
    ),
    "apply with no function": (
        lambda: apply_activation_checkpointing(_sequential(), None),
        PolicyError,
        "apply_activation_checkpointing: option 'checkpoint_wrapper_fn' is None, but it must be a "
        "function that wraps a module. Pass checkpoint_wrapper or offload_wrapper.",
    ),
    "clean a module": (
        lambda: clean_state_dict(nn.ReLU()),
        OptionError,
        "clean_state_dict: state_dict is of type ReLU, but it must map names to values. Pass "
        "model.state_dict(), or what torch.load returned.",
    ),
    "apply, nothing returned": (
        lambda: apply_activation_checkpointing(_sequential(), lambda module: None),
        ModuleError,
        "apply_activation_checkpointing: option 'checkpoint_wrapper_fn' returned None "
        "for module '0', but it must return an nn.Module. Return the wrapped module.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_messages(case):
    """Compares the full text of the message."""
    call, error, message = CASES[case]
    with pytest.raises(error, match=f"^ckpt_wrap.{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("name", ["min_bytes", "max_bytes_away"])
@pytest.mark.parametrize("value", [-1, 1.0, "1", True], ids=repr)
def test_a_number_is_an_int_of_at_least_zero(name, value):
    """A bool is refused, although bool is a subclass of int."""
    module = nn.ReLU()
    with pytest.raises(OptionError, match=f"option '{name}' is {value!r}, but it must be an int"):
        offload_(module, **{name: value})
    assert type(module) is nn.ReLU


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda model: apply_activation_checkpointing(model, check_fn=nn.ReLU),
            PolicyError,
            "option 'check_fn' is .* must be a function of a module",
        ),
        (
            lambda model: checkpoint_(model, context_fn=torch.no_grad()),
            OptionError,
            "option 'context_fn' is .* must be a function that returns two context managers",
        ),
        (lambda model: checkpoint_(model, bogus=1), OptionError, "option 'bogus' needs"),
        (
            lambda model: checkpoint_layers_(model, lambda name, _: name in ("0", "2")),
            ModuleError,
            r"module '2' \(ModuleList\) has no forward",
        ),
        (lambda model: checkpoint_(model, True), OptionError, "'checkpoint_impl' is True"),
        (
            lambda model: offload_(model, "cpu"),
            TypeError,
            "ckpt_wrap.offload_: too many positional",
        ),
        (
            lambda model: offload_(model, pin_memory=True),
            TypeError,
            "ckpt_wrap.offload_: got an unexpected keyword argument 'pin_memory'",
        ),
    ],
)
def test_wrong_calls_change_nothing(call, error, message):
    """Wrong arguments are refused before anything is changed."""
    model = nn.Sequential(*_sequential(), nn.ModuleList())
    kinds = [nn.Sequential, nn.Linear, nn.ReLU, nn.ModuleList]
    with pytest.raises(error, match=message):
        call(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_module_that_cannot_be_subclassed_can_be_wrapped():
    """The message recommends wrapping."""
    assert checkpoint_wrapper(module := Final())._checkpoint_wrapped_module is module


def test_every_error_is_of_one_family_and_of_a_builtin():
    """All share one base class and also derive from the matching builtin exception."""
    for error, builtin in [
        (ModuleError, TypeError),
        (OptionError, ValueError),
        (PolicyError, ValueError),
        (RecomputeError, RuntimeError),
        (OffloadError, RuntimeError),
    ]:
        assert issubclass(error, CkptWrapError)
        assert issubclass(error, builtin)
    assert issubclass(ckpt_wrap.CkptWrapError, Exception)
