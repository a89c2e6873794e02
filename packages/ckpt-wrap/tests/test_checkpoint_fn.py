"""`checkpoint_fn` is called with the function, its arguments and its options."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckpt_wrap import CheckpointImpl, checkpoint_, checkpoint_wrapper


def test_an_engines_own_names_do_not_hide_the_modules_keywords():
    """A keyword with the name of an option or parameter of the function is passed by position."""

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
    """The parameter names of a builtin function cannot be inspected."""
    inner, x = nn.Linear(2, 2), torch.ones(3, 2)
    assert torch.equal(torch.stack([*checkpoint_wrapper(inner, checkpoint_fn=map)(x)]), inner(x))


def _echo(function, *args, **kwargs):
    """A checkpoint function that calls nothing and returns its arguments."""
    return function, args, kwargs


class Times(nn.Module):
    """Takes a keyword argument that has the name of an option."""

    def forward(self, x, *, debug=1):
        return x * debug


def test_a_keyword_named_like_an_option_of_torchs_function():
    """The keyword reaches the module and gets its gradient."""
    wrapped = checkpoint_wrapper(Times(), checkpoint_fn=torch_checkpoint, use_reentrant=True)
    x = torch.ones(2, requires_grad=True)
    wrapped(torch.ones(2), debug=x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_options_of_a_given_function_are_passed_to_it():
    """Unknown options are passed, and options of this package that differ from their default."""
    options = {"anything": 1, "use_reentrant": False, "early_stop": False}
    wrapped = checkpoint_wrapper(nn.ReLU(), checkpoint_fn=_echo, preserve_rng_state=True, **options)
    assert wrapped(4)[1:] == ((4,), options)


@pytest.mark.parametrize("make", [checkpoint_, checkpoint_wrapper])
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_impl": CheckpointImpl.REENTRANT},
        {"use_reentrant": True},
        {"use_reentrant": False, "debug": False},
    ],
    ids=str,
)
def test_choice_of_an_implementation_is_accepted(make, options):
    """Every choice selects the implementation for inputs without gradients and nested results."""

    class Nested(nn.Linear):
        def forward(self, given):
            return {"out": torch.tanh(super().forward(given["x"][0]))}

    torch.manual_seed(0)
    plain = Nested(3, 3)
    changed = make(copy.deepcopy(plain), **options)
    for module in (plain, changed):
        module({"x": [torch.ones(2, 3)]})["out"].sum().backward()
    assert torch.equal(plain.weight.grad, changed.weight.grad)
