"""The options of checkpointing are checked when they are given, and the error names the option."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from ckpt_wrap import (
    CheckpointImpl,
    ModuleError,
    OptionError,
    checkpoint_,
    checkpoint_wrapper,
)
from ckpt_wrap._checkpoint_fn import make_checkpoint_fn
from ckpt_wrap._errors import require_module
from ckpt_wrap._options import CheckpointOptions

NO_REENTRANT, REENTRANT = CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT


def checkpoint_options(impl, given, made_by):
    """The validated options of this package's own checkpoint function."""
    return make_checkpoint_fn(made_by, checkpoint_impl=impl, **given).options


def contexts():
    """Two that do nothing."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def test_context_fn_and_reentrant_conflict():
    """The option that cannot work is named when the module is wrapped."""
    with pytest.raises(OptionError, match="'context_fn' is set with checkpoint_impl"):
        checkpoint_(nn.Linear(1, 1), checkpoint_impl=CheckpointImpl.REENTRANT, context_fn=dict)


def test_what_is_not_given_is_as_in_torch():
    """Random state is replayed, a recomputation stops early and is compared, nothing is printed."""
    options = checkpoint_options(NO_REENTRANT, {}, "checkpoint_")
    assert options == CheckpointOptions()
    assert options.preserve_rng_state
    assert options.early_stop
    assert not options.debug
    assert options.determinism_check == "default"


@pytest.mark.parametrize("name", ["preserve_rng_state", "debug", "early_stop"])
@pytest.mark.parametrize("value", [1, None, "yes"], ids=repr)
def test_a_switch_is_a_bool(name, value):
    """Not whatever is true or false."""
    with pytest.raises(OptionError) as caught:
        checkpoint_options(NO_REENTRANT, {name: value}, "checkpoint_")
    assert str(caught.value) == (
        f"ckpt_wrap.checkpoint_: option '{name}' is {value!r}, but it must be a bool. "
        "Pass True or False."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"determinism_check": "all"}, "it must be 'default' or 'none'. Pass one of them."),
        ({"context_fn": 3}, "it must be a function that returns two context managers. Pass such"),
        ({"use_reentrant": 1}, "it must be a bool. Pass True or False."),
        ({"earlystop": True}, "option 'earlystop' is unknown"),
        ({"policy": 3}, "pass checkpoint_fn=sac_policies.checkpoint, policy="),
        ({"impl": REENTRANT}, "option 'impl' is unknown"),
        ({"debug": True, "context_fn": contexts}, "debug brings a context of its own. Pass only"),
    ],
    ids=[
        "check",
        "no function",
        "neither True nor False",
        "mistyped",
        "a policy",
        "given otherwise",
        "two contexts",
    ],
)
def test_a_value_that_cannot_work_is_refused(options, message):
    """The message has the function, the rule and what to do."""
    with pytest.raises(OptionError) as caught:
        checkpoint_options(NO_REENTRANT, options, "checkpoint_wrapper")
    assert str(caught.value).startswith("ckpt_wrap.checkpoint_wrapper: option '")
    assert message in str(caught.value)


@pytest.mark.parametrize("impl", [True, None, "REENTRANT"], ids=repr)
def test_an_implementation_is_one_of_two(impl):
    """A bool, which `use_reentrant` takes, is none."""
    with pytest.raises(
        OptionError, match=r"option 'checkpoint_impl' is .* must be a CheckpointImpl"
    ):
        checkpoint_options(impl, {}, "checkpoint_")


@pytest.mark.parametrize(("value", "impl"), [(False, NO_REENTRANT), (True, REENTRANT)])
def test_use_reentrant_chooses_the_implementation(value, impl):
    """For both layers, and the conflicts of the implementation are checked."""
    assert checkpoint_options(NO_REENTRANT, {"use_reentrant": value}, "checkpoint_").impl is impl
    assert checkpoint_wrapper(nn.ReLU(), use_reentrant=value).checkpoint_impl is impl
    x = torch.ones(1, 2, requires_grad=True)
    node = checkpoint_(nn.Linear(2, 2), use_reentrant=value)(x).grad_fn
    assert ("Reentrant" in type(node).__name__) is value


def test_use_reentrant_against_checkpoint_impl_is_refused():
    """Also an option that the chosen implementation does not have."""
    with pytest.raises(OptionError, match="'use_reentrant' is False, but checkpoint_impl="):
        checkpoint_(nn.ReLU(), checkpoint_impl=REENTRANT, use_reentrant=False)
    with pytest.raises(OptionError, match="'debug' is set with"):
        checkpoint_(nn.ReLU(), use_reentrant=True, debug=True)
    checkpoint_(nn.ReLU(), checkpoint_impl=REENTRANT, use_reentrant=True)


@pytest.mark.parametrize(
    "options", [{"debug": True}, {"context_fn": contexts}], ids=["debug", "context_fn"]
)
def test_what_one_implementation_cannot_do_the_other_can(options):
    """Refused with REENTRANT, taken without."""
    (name,) = options
    with pytest.raises(OptionError, match=f"option '{name}' is set with .*REENTRANT, but only"):
        checkpoint_options(REENTRANT, options, "checkpoint_")
    checkpoint_options(NO_REENTRANT, options, "checkpoint_")


@pytest.mark.parametrize(
    "options",
    [{"debug": False}, {"preserve_rng_state": False}, {"determinism_check": "none"}],
    ids=str,
)
def test_reentrant_takes_the_others(options):
    """Among them `debug` where it is off."""
    assert checkpoint_options(REENTRANT, options, "checkpoint_").impl is REENTRANT


class NotInitialised(nn.Module):
    """Forgets to call `super().__init__()`."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nn.ReLU, "module is <class .*ReLU'> of type type, but it must be an nn.Module"),
        (NotInitialised(), r"class NotInitialised is not initialised.*Call super\(\).__init__"),
    ],
    ids=["a class", "not initialised"],
)
def test_a_module_is_an_initialised_one(value, message):
    """The class in the place of a module, and one whose `__init__` did nothing."""
    with pytest.raises(ModuleError, match=f"^ckpt_wrap.somewhere: .*{message}"):
        require_module(value, "somewhere")
    require_module(nn.ReLU(), "somewhere")
