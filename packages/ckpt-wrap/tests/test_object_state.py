"""What is followed among the arguments, and what a new object of its class has."""

from __future__ import annotations

import argparse
import enum
import random
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ckpt_wrap import RecomputeError
from ckpt_wrap.checkpointing._object_state import same_state, state_of


class Scale(float):
    """A number that counts its uses."""

    uses = 0


class Turn(complex):
    """A number whose parts cannot be written to, and that counts its uses."""

    uses = 0


class Label(str):
    """A word that counts its uses, and is not made from it."""

    uses = 0

    def __new__(cls, letter, times):
        return super().__new__(cls, letter * times)


class Warned(Exception):
    """Something builtin that holds more than its attributes."""

    uses = 0


class Uses(nn.Module):
    """Counts the uses of what it is given, alone or in a list."""

    def forward(self, x, given):
        target = given[0] if isinstance(given, list) else given
        target.uses += 1
        return (x * target.uses * (target if isinstance(target, float) else len(str(target)))).exp()


@pytest.mark.parametrize("make", [lambda: Scale(3.0), lambda: Turn(2j), lambda: Label("ab", 2)])
@pytest.mark.parametrize("inside", [False, True])
def test_numbers_and_words_with_attributes_are_as_they_were(wrap, make, inside):
    """Their attributes, and their values with them."""
    grads = []
    for module in (Uses(), wrap(Uses())):
        x, target = torch.ones(2, requires_grad=True), make()
        module(x, [target] if inside else target).sum().backward()
        grads.append(x.grad)
        assert target.uses == 1
    assert torch.equal(*grads)


def test_a_builtin_that_holds_something_else_is_refused_if_it_changes(wrap):
    """A new error would not have the arguments of the old one."""
    with pytest.raises(RecomputeError, match="its class Warned makes no new ones"):
        wrap(Uses())(torch.ones(2, requires_grad=True), Warned("a"))


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        nn.ReLU(),
        nn.Linear,
        Colour.RED,
        torch.distributions.Normal(0.0, 1.0),
        torch.finfo(torch.float32),
        argparse.Namespace(items=[]),
        *(3, "a", None, 1.5, lambda: 1),
    ],
)
def test_what_is_not_followed_is_passed_as_it_is(value):
    """Modules, classes, members of enumerations, instances of torch and the standard library."""
    assert state_of(value) is None


@pytest.mark.parametrize(
    "value",
    [
        *([], (), {}, set(), deque(), OrderedDict(), defaultdict(list)),
        *(Label("a", 1), SimpleNamespace(), random.Random(0), torch.Generator(), Scale(1.0)),
    ],
)
def test_what_is_followed(value):
    """Containers, instances of classes written in Python, random generators."""
    assert same_state(state_of(value))
