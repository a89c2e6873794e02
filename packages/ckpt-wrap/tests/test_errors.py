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
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_stats,
    offload_wrapper,
    unwrap,
)

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
    "impl": (
        lambda: checkpoint_wrapper(nn.ReLU(), "REENTRANT"),
        OptionError,
        "ckpt_wrap.checkpoint: option 'checkpoint_impl' is 'REENTRANT', but it must be a "
        "CheckpointImpl. Pass CheckpointImpl.NO_REENTRANT or CheckpointImpl.REENTRANT.",
    ),
    "unknown": (
        lambda: checkpoint_(nn.ReLU(), preserve_rng=True),
        OptionError,
        "ckpt_wrap.checkpoint: option 'preserve_rng' is unknown, but options must be among "
        "preserve_rng_state, context_fn, determinism_check, debug, early_stop. "
        "Did you mean 'preserve_rng_state'?",
    ),
    "far off": (
        lambda: checkpoint_(nn.ReLU(), zzz=1),
        OptionError,
        "ckpt_wrap.checkpoint: option 'zzz' is unknown, but options must be among "
        "preserve_rng_state, context_fn, determinism_check, debug, early_stop. Leave it out.",
    ),
    "determinism_check": (
        lambda: checkpoint_(nn.ReLU(), determinism_check="nope"),
        OptionError,
        "ckpt_wrap.checkpoint: option 'determinism_check' is 'nope', but it must be one of "
        "('default', 'none'). Pass one of them.",
    ),
    "bool": (
        lambda: checkpoint_(nn.ReLU(), early_stop=1),
        OptionError,
        "ckpt_wrap.checkpoint: option 'early_stop' is 1, but it must be a bool. "
        "Pass True or False.",
    ),
    "context_fn": (
        lambda: checkpoint_(nn.ReLU(), context_fn=3),
        OptionError,
        "ckpt_wrap.checkpoint: option 'context_fn' is 3, but it must be a function that returns "
        "two context managers. Pass such a function.",
    ),
    "conflict": (
        lambda: checkpoint_(nn.ReLU(), checkpoint_impl=CheckpointImpl.REENTRANT, debug=True),
        OptionError,
        "ckpt_wrap.checkpoint: option 'debug' is set with checkpoint_impl=CheckpointImpl."
        "REENTRANT, but only NO_REENTRANT supports it. Leave one of the two out.",
    ),
    "debug": (
        lambda: checkpoint_(nn.ReLU(), debug=True, context_fn=dict),
        OptionError,
        "ckpt_wrap.checkpoint: option 'debug' is True together with 'context_fn', but debug "
        "brings a context of its own. Pass only one of them.",
    ),
    "checkpoint_fn": (
        lambda: checkpoint_(nn.ReLU(), checkpoint_fn=3),
        OptionError,
        "ckpt_wrap.checkpoint: option 'checkpoint_fn' is 3, but it must be a function called as "
        "checkpoint_fn(function, *args, **kwargs). Pass such a function.",
    ),
    "offload option": (
        lambda: offload_(nn.ReLU(), keep=1),
        OptionError,
        "ckpt_wrap.offload_: option 'keep' is unknown, but options must be among to, min_bytes, "
        "keep_last, max_inflight_bytes. Did you mean 'keep_last'?",
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


def test_a_lambda_is_not_a_module():
    """What was given is shown."""
    with pytest.raises(ModuleError, match=r"module is <function .*> of type function"):
        checkpoint_(lambda x: x)


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
        with pytest.raises(OptionError):
            change(module, bogus=1)
    assert type(module) is nn.ReLU


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
