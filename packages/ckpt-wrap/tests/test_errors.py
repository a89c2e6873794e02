"""Every message: what, where, the rule and what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import ckpt_wrap
from ckpt_wrap import (
    CheckpointImpl,
    CkptWrapError,
    ModuleError,
    OffloadError,
    OptionError,
    PolicyError,
    RecomputeError,
    apply_activation_checkpointing,
    checkpoint_,
    checkpoint_wrapper,
    make_plan,
    offload_,
    offload_stats,
    offload_wrapper,
    unwrap,
)


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        pass


class Final(nn.Module):
    def __init_subclass__(cls) -> None:
        raise ValueError("no heirs")


MODULE = "module is None of type NoneType, but it must be an nn.Module. Pass the module itself."
CASES = {
    "checkpoint_": (lambda: checkpoint_(None), ModuleError, f"ckpt_wrap.checkpoint_: {MODULE}"),
    "offload_": (lambda: offload_(None), ModuleError, f"ckpt_wrap.offload_: {MODULE}"),
    "unwrap": (lambda: unwrap(None), ModuleError, f"ckpt_wrap.unwrap: {MODULE}"),
    "stats": (lambda: offload_stats(None), ModuleError, f"ckpt_wrap.offload_stats: {MODULE}"),
    "checkpoint_wrapper": (
        lambda: checkpoint_wrapper(None),
        ModuleError,
        f"ckpt_wrap.CheckpointWrapper: {MODULE}",
    ),
    "offload_wrapper": (
        lambda: offload_wrapper(None),
        ModuleError,
        f"ckpt_wrap.OffloadWrapper: {MODULE}",
    ),
    "list of modules": (
        lambda: checkpoint_([]),
        ModuleError,
        "ckpt_wrap.checkpoint_: module is [] of type list, but it must be an nn.Module. Call it "
        "for each module.",
    ),
    "impl": (
        lambda: checkpoint_wrapper(nn.ReLU(), "REENTRANT"),
        OptionError,
        "ckpt_wrap.checkpoint_wrapper: option 'checkpoint_impl' is 'REENTRANT', but it must be a "
        "CheckpointImpl. Pass CheckpointImpl.NO_REENTRANT or CheckpointImpl.REENTRANT.",
    ),
    "unknown": (
        lambda: checkpoint_(nn.ReLU(), preserve_rng=True),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'preserve_rng' is unknown. Did you mean "
        "'preserve_rng_state'? Options that are not those of torch.utils.checkpoint.checkpoint "
        "are only accepted together with checkpoint_fn=, which receives them.",
    ),
    "policy": (
        lambda: checkpoint_(nn.ReLU(), policy=3),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'policy' needs checkpoint_fn=. For a policy of "
        "sac-policies, pass checkpoint_fn=sac_policies.checkpoint, policy=...",
    ),
    "use_reentrant": (
        lambda: checkpoint_(nn.ReLU(), use_reentrant=1),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'use_reentrant' is 1, but it must be a bool. "
        "Pass True or False.",
    ),
    "use_reentrant and impl": (
        lambda: checkpoint_wrapper(
            nn.ReLU(), checkpoint_impl=CheckpointImpl.REENTRANT, use_reentrant=False
        ),
        OptionError,
        "ckpt_wrap.checkpoint_wrapper: option 'use_reentrant' is False, but "
        "checkpoint_impl=CheckpointImpl.REENTRANT asks for the opposite. Pass only one of them.",
    ),
    "container": (
        lambda: checkpoint_(nn.ModuleList([nn.ReLU()])),
        ModuleError,
        "ckpt_wrap.checkpoint_: module ModuleList has no forward, but only a module that is "
        "called can be checkpointed or offloaded. Wrap its items instead, one by one.",
    ),
    "offload to nothing": (
        lambda: offload_(nn.ReLU(), to=""),
        OptionError,
        "ckpt_wrap.offload_: option 'to' is '', but it must be 'cpu' or the path of a folder. "
        "Pass one of them.",
    ),
    "offload to a device": (
        lambda: offload_(nn.ReLU(), to="cuda:0"),
        OptionError,
        "ckpt_wrap.offload_: option 'to' is 'cuda:0', but offload goes to 'cpu' or to a folder. "
        "Pass './cuda:0' if you mean a folder.",
    ),
    "not initialised": (
        lambda: checkpoint_(Uninitialised()),
        ModuleError,
        "ckpt_wrap.checkpoint_: module of class Uninitialised is not initialised, but "
        "nn.Module.__init__ must have run. Call super().__init__() in its __init__.",
    ),
    "not initialised, wrapped": (
        lambda: checkpoint_wrapper(Uninitialised()),
        ModuleError,
        "ckpt_wrap.CheckpointWrapper: module of class Uninitialised is not initialised, but "
        "nn.Module.__init__ must have run. Call super().__init__() in its __init__.",
    ),
    "compiled": (
        lambda: checkpoint_(torch.compile(nn.ReLU(), backend="eager")),
        ModuleError,
        "ckpt_wrap.checkpoint_: module OptimizedModule is compiled, but it is the module inside "
        "that must be changed. Call this before torch.compile, or on its _orig_mod.",
    ),
    "final": (
        lambda: offload_(Final()),
        ModuleError,
        "ckpt_wrap.offload_: module Final cannot be subclassed (no heirs), but a subclass of its "
        "class is made for it. Use checkpoint_wrapper or offload_wrapper.",
    ),
    "apply to None": (
        lambda: apply_activation_checkpointing(None),
        ModuleError,
        f"ckpt_wrap.apply_activation_checkpointing: {MODULE}",
    ),
    "apply None": (
        lambda: apply_activation_checkpointing(nn.Sequential(nn.ReLU()), None),
        OptionError,
        "ckpt_wrap.apply_activation_checkpointing: option 'checkpoint_wrapper_fn' is None, but it "
        "must be a function of a module. Pass such a function.",
    ),
    "apply a name": (
        lambda: apply_activation_checkpointing(nn.Sequential(nn.ReLU()), check_fn="ReLU"),
        OptionError,
        "ckpt_wrap.apply_activation_checkpointing: option 'check_fn' is 'ReLU', but it must be a "
        "function of a module. Pass such a function.",
    ),
    "apply, nothing returned": (
        lambda: apply_activation_checkpointing(nn.Sequential(nn.ReLU()), lambda module: None),
        ModuleError,
        "ckpt_wrap.apply_activation_checkpointing: option 'checkpoint_wrapper_fn' returned None "
        "for module '0', but it must return an nn.Module. Return the wrapped module.",
    ),
    "plan applied to None": (
        lambda: make_plan(nn.Sequential(nn.ReLU()), lambda *_: True).apply(None),
        ModuleError,
        f"ckpt_wrap.Plan.apply: {MODULE}",
    ),
    "rule is a name": (
        lambda: make_plan(nn.Sequential(nn.ReLU()), "0"),
        PolicyError,
        "ckpt_wrap.make_plan: rule is '0', but it must be a function of a name and a module that "
        "returns a bool or options. Pass such a function.",
    ),
    "determinism_check": (
        lambda: checkpoint_(nn.ReLU(), determinism_check="nope"),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'determinism_check' is 'nope', but it must be 'default' or "
        "'none'. Pass one of them.",
    ),
    "bool": (
        lambda: checkpoint_(nn.ReLU(), early_stop=1),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'early_stop' is 1, but it must be a bool. "
        "Pass True or False.",
    ),
    "context_fn": (
        lambda: checkpoint_(nn.ReLU(), context_fn=3),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'context_fn' is 3, but it must be a function that returns "
        "two context managers. Pass such a function.",
    ),
    "conflict": (
        lambda: checkpoint_(nn.ReLU(), checkpoint_impl=CheckpointImpl.REENTRANT, debug=True),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'debug' is set with checkpoint_impl=CheckpointImpl."
        "REENTRANT, but only NO_REENTRANT supports it. Leave one of the two out.",
    ),
    "debug": (
        lambda: checkpoint_(nn.ReLU(), debug=True, context_fn=dict),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'debug' is True together with 'context_fn', but debug "
        "brings a context of its own. Pass only one of them.",
    ),
    "checkpoint_fn": (
        lambda: checkpoint_(nn.ReLU(), checkpoint_fn=3),
        OptionError,
        "ckpt_wrap.checkpoint_: option 'checkpoint_fn' is 3, but it must be a function called as "
        "checkpoint_fn(function, *args, **kwargs). Pass such a function.",
    ),
    "offload to a folder that is not there": (
        lambda: offload_(nn.ReLU(), to="cup"),
        OptionError,
        "ckpt_wrap.offload_: option 'to' is 'cup', but the folder must exist, so that a typo "
        "does not create one. Pass create=True to create it, or 'cpu' for host memory.",
    ),
    "create": (
        lambda: offload_(nn.ReLU(), to="cup", create=1),
        OptionError,
        "ckpt_wrap.offload_: option 'create' is 1, but it must be a bool. Pass True or False.",
    ),
    "offload number": (
        lambda: offload_(nn.ReLU(), min_bytes=-1),
        OptionError,
        "ckpt_wrap.offload_: option 'min_bytes' is -1, but it must be an int of at least 0. "
        "Pass such a number.",
    ),
    "offload to": (
        lambda: offload_(nn.ReLU(), to=3),
        OptionError,
        "ckpt_wrap.offload_: option 'to' is 3, but it must be 'cpu' or the path of a folder. "
        "Pass one of them.",
    ),
    "lazy": (
        lambda: checkpoint_(nn.LazyLinear(2)),
        ModuleError,
        "ckpt_wrap.checkpoint_: module LazyLinear is lazy, but it must have its "
        "parameters, as it changes its class when it gets them. Run one forward first.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_messages(case):
    """The whole sentence."""
    call, error, message = CASES[case]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda model: make_plan(model, nn.ReLU),
            PolicyError,
            r"rule is .*Pass lambda name, module: isinstance\(module, ReLU\)",
        ),
        (
            lambda model: make_plan(model, lambda module: True),
            PolicyError,
            "rule is .* must be a function of a name and a module",
        ),
        (
            lambda model: apply_activation_checkpointing(model, check_fn=nn.ReLU),
            OptionError,
            "option 'check_fn' is .* must be a function of a module",
        ),
        (
            lambda model: apply_activation_checkpointing(model, check_fn=lambda name, module: True),
            OptionError,
            "option 'check_fn' is .* must be a function of a module",
        ),
        (
            lambda model: apply_activation_checkpointing(
                model, checkpoint_wrapper_fn=checkpoint_wrapper(nn.ReLU())
            ),
            OptionError,
            "option 'checkpoint_wrapper_fn' is CheckpointWrapper",
        ),
        (
            lambda model: checkpoint_(model, context_fn=torch.no_grad()),
            OptionError,
            "option 'context_fn' is .* must be a function that returns two context managers",
        ),
    ],
)
def test_a_class_or_another_call_in_place_of_a_function(call, error, message):
    """Refused before anything is changed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(error, match=message):
        call(model)
    assert [type(module) for module in model.modules()] == [nn.Sequential, nn.Linear, nn.ReLU]


def test_a_module_that_cannot_be_subclassed_can_be_wrapped():
    """The next step the message gives works, and the class is left alone."""
    module = Final()
    with pytest.raises(ModuleError):
        checkpoint_(module)
    assert type(module) is Final
    assert checkpoint_wrapper(module)._checkpoint_wrapped_module is module


def test_a_scripted_module_is_refused():
    """Its class cannot change."""

    class Fake(torch.jit.ScriptModule):
        pass

    with pytest.raises(ModuleError, match=r"module Fake is scripted.*Wrap it before scripting"):
        checkpoint_(Fake())


def test_a_failing_option_leaves_the_module_alone():
    """Options are checked before the class changes."""
    module = nn.ReLU()
    for change in (checkpoint_, offload_):
        with pytest.raises(OptionError, match="bogus"):
            change(module, bogus=1)
    assert type(module) is nn.ReLU


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checkpoint_(nn.ReLU(), True), "ckpt_wrap.checkpoint_: too many positional"),
        (lambda: checkpoint_(), "ckpt_wrap.checkpoint_: missing a required argument: 'module'"),
        (lambda: offload_(nn.ReLU(), "cpu"), "ckpt_wrap.offload_: too many positional"),
        (
            lambda: offload_wrapper(nn.ReLU(), pin_memory=True),
            "ckpt_wrap.offload_wrapper: got an unexpected keyword argument 'pin_memory'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_explained(call, message):
    """The sentence ends with the options by name."""
    with pytest.raises(OptionError, match=rf"^{re.escape(message)}.*options by name: \w+, .*\.$"):
        call()


def test_every_error_is_of_one_family_and_of_a_builtin():
    """One base class, and the built-in class a caller would expect."""
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
