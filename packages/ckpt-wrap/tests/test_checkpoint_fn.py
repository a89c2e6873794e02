"""A checkpoint function, whoever wrote it, gets the function, its arguments and its options."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_wrap import checkpoint_wrapper


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
