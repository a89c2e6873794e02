"""A checkpoint function, whoever wrote it, gets the function, its arguments and its options."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckpt_wrap import CheckpointImpl, checkpoint_wrapper
from ckpt_wrap._checkpoint_fn import (
    BoundCheckpointFn,
    make_checkpoint_fn,
)


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


def _double(x, *, debug=1):
    return x * debug


def test_all_keywords_go_by_position_where_tensors_are_looked_for_there():
    """With REENTRANT, and with torch's own function."""
    bound = BoundCheckpointFn(_echo, {}, positional=True)
    function, args, kwargs = bound(_double, 4, debug=3)
    assert (args, kwargs) == ((4, 3), {})
    assert function(*args) == 12
    for impl, fn, positional in [
        (CheckpointImpl.REENTRANT, _echo, True),
        (CheckpointImpl.NO_REENTRANT, torch_checkpoint, True),
        (CheckpointImpl.NO_REENTRANT, _echo, False),
    ]:
        made = make_checkpoint_fn("checkpoint_wrapper", checkpoint_impl=impl, checkpoint_fn=fn)
        assert made._positional is positional


def test_options_of_a_given_function_are_passed_to_it():
    """Unknown ones, and those of this package that differ from their default."""
    made = make_checkpoint_fn(
        "checkpoint_", checkpoint_fn=_echo, anything=1, use_reentrant=False, early_stop=False
    )
    assert made.keywords == {"anything": 1, "use_reentrant": False, "early_stop": False}
