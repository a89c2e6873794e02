"""The search for tensors in values, which runs no code of these values."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker
from mod_tracker._edges import edges_of, tensors_in

Pair = namedtuple("Pair", "a b")


@dataclass
class Box:
    inside: object


def test_tensors_are_found_in_every_container():
    """Tuples, lists, sets, mappings, named tuples and dataclasses, nested."""
    t = [torch.ones(1) for _ in range(6)]
    value = (t[0], [t[1]], OrderedDict(x=t[2]), Pair(t[3], 1), Box(Box(t[4])), {t[5]}, None, "s")
    assert [id(found) for found in tensors_in(value)] == [id(tensor) for tensor in t]


def test_search_ends_on_values_that_contain_themselves():
    """A list that contains itself does not loop forever."""
    value = [torch.ones(1)]
    value.append(value)
    assert tensors_in(value)


def test_edges_are_distinct_and_only_of_tensors_with_gradients(x):
    y = x * 2
    halves = torch.ones(4, requires_grad=True).split(2)
    assert len(edges_of((y, y, torch.ones(1)), {})) == 1
    assert [position for _, position in edges_of(halves, {})] == [0, 1]


class Lazy(Mapping):
    """A mapping that raises when read."""

    def __getitem__(self, key):
        raise ZeroDivisionError

    def __iter__(self):
        raise ZeroDivisionError

    def __len__(self):
        raise ZeroDivisionError


class Guarded(OrderedDict):
    """A dict whose overridden methods raise."""

    def values(self):
        raise ZeroDivisionError

    def __iter__(self):
        raise ZeroDivisionError


class Proxy:
    """An object that raises when asked for its class."""

    @property
    def __class__(self):
        raise ZeroDivisionError


class Hiding(Box):
    """A dataclass whose fields raise when read."""

    def __getattribute__(self, name):
        raise ZeroDivisionError


class Loud(torch.Tensor):
    """A tensor that raises on every torch function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ZeroDivisionError


@pytest.mark.parametrize("make", [Lazy, Guarded, Proxy, lambda: Hiding(1), lambda: Loud(2)])
def test_values_that_raise_when_read_pass_through(make, log_events):
    """The model gets its argument and its output; the tracker raises nothing."""
    value, tracker = make(), ModTracker()
    log_events(tracker)
    with tracker:
        assert nn.Sequential(nn.Identity())(value) is value


def test_a_dataclass_without_one_of_its_values_is_searched():

    @dataclass
    class Pair:
        first: torch.Tensor
        second: torch.Tensor

    pair = Pair(torch.ones(1), torch.ones(2))
    del pair.first
    assert tensors_in(pair) == [pair.second]
