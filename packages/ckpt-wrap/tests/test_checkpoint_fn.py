"""A checkpoint function, whoever wrote it, gets the function, its arguments and its options."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckpt_wrap import CheckpointImpl, checkpoint_wrapper


def test_an_engines_own_names_do_not_hide_the_modules_keywords():
    """A keyword named like the function's option or parameter is handed over by position."""

    class Label(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x, label=None, function=None):
            return x * self.weight, label, function

    def own_checkpoint(function, *args, label, **kwargs):
        return function(*args, **kwargs)

    wrapped = checkpoint_wrapper(Label(), checkpoint_fn=own_checkpoint, label="the function's")
    assert wrapped(torch.ones(1), label="a", function="b")[1:] == ("a", "b")


def test_a_builtin_function_is_a_checkpoint_fn():
    """Nothing tells the names of its parameters."""
    inner, x = nn.Linear(2, 2), torch.ones(3, 2)
    assert torch.equal(torch.stack([*checkpoint_wrapper(inner, checkpoint_fn=map)(x)]), inner(x))


def _echo(function, *args, **kwargs):
    """What it was given, as a checkpoint function; nothing is called."""
    return function, args, kwargs


class Times(nn.Module):
    """Takes a keyword that is named like an option."""

    def forward(self, x, *, debug=1):
        return x * debug


@pytest.mark.parametrize(
    "options",
    [{"checkpoint_fn": _echo, "checkpoint_impl": CheckpointImpl.REENTRANT}, {}],
    ids=["reentrant", "other"],
)
def test_keywords_go_by_position_where_tensors_are_looked_for_there(options):
    """With REENTRANT; other functions get them by keyword."""
    wrapped = checkpoint_wrapper(Times(), **{"checkpoint_fn": _echo, **options})
    function, args, kwargs = wrapped(4, debug=3)
    assert function(*args, **kwargs) == 12
    assert (args, kwargs) == (((4, 3), {}) if options else ((4,), {"debug": 3}))


def test_torchs_function_gets_keywords_by_position():
    """It looks for tensors among positional arguments only."""
    wrapped = checkpoint_wrapper(Times(), checkpoint_fn=torch_checkpoint, use_reentrant=True)
    x = torch.ones(2, requires_grad=True)
    wrapped(torch.ones(2), debug=x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_options_of_a_given_function_are_passed_to_it():
    """Unknown ones, and those of this package that differ from their default."""
    options = {"anything": 1, "use_reentrant": False, "early_stop": False}
    wrapped = checkpoint_wrapper(nn.ReLU(), checkpoint_fn=_echo, preserve_rng_state=True, **options)
    assert wrapped(4)[1:] == ((4,), options)
