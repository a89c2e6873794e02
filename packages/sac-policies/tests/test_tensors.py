"""Tensors are found in containers of every class, including classes unknown to pytree."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple

import pytest
import torch

from sac_policies import recompute_all, report
from sac_policies._tensors import tensors_in


class Batch(dict):
    """A dict subclass that is not registered with pytree."""


class Rows(list):
    """A list subclass."""


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: (a, [b]),
        lambda a, b: {"a": a, "b": {"c": b}},
        lambda a, b: OrderedDict(a=Batch(a=a), b=b),
        lambda a, b: Batch(a=a, n=3, b=Rows([b, "text"])),
        lambda a, b: Pair(Rows([a]), deque([Batch(b=b)])),
        lambda a, b: Rows([Batch(), Batch(a=a), Batch(a=None), Batch(b=b)]),
    ],
)
def test_tensors_are_found_in_order(make):
    """In containers of any kind and depth."""
    a, b = torch.ones(2, requires_grad=True), torch.zeros(2)
    found = tensors_in(make(a, b))
    assert [id(each) for each in found] == [id(a), id(b)]


def test_container_that_holds_itself_is_read_once():
    """Some configurations contain their root; a container that occurs twice is read twice."""
    a = torch.ones(2)
    root = Batch(a=a)
    root["root"] = Batch(parent=root)
    assert [id(each) for each in tensors_in(root)] == [id(a)]
    inner = Batch(a=a)
    assert len(tensors_in([inner, inner])) == 2


@pytest.mark.parametrize("kind", [dict, Batch])
def test_values_that_a_region_is_given_in_a_dict_are_read_there(kind):
    """No sum of inputs is kept, whatever the class of the dict."""
    x, u = (torch.linspace(-1, 1, 36).requires_grad_() for _ in range(2))

    def body(t, batch):
        return (t + batch["u"]).sin()

    policy, given = recompute_all(), kind(u=u + u)
    assert report(body, x, given, policy=policy).held_bytes == 0
