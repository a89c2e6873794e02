"""Hooks that are entered by hand, and without torch's names for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sac_policies._torch_compat import _saved_hooks, saved_tensor_hooks


@pytest.mark.parametrize(
    ("push", "pop"),
    [
        (_saved_hooks.push_hooks, _saved_hooks.pop_hooks),
        (_saved_hooks._push, _saved_hooks._pop),
    ],
    ids=["found", "fallback"],
)
def test_hooks_are_used_until_they_are_left(push: Callable[..., None], pop: Callable[[], None]):
    """The innermost ones, and then those around."""
    saved: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    around = (lambda tensor: tensor, lambda held: held)
    push(*around)
    push(lambda tensor: saved.append(tensor) or len(saved), lambda at: saved[at - 1])
    out = x.sin()
    pop()
    assert saved_tensor_hooks() == around
    pop()
    assert saved_tensor_hooks() is None
    out.sum().backward()
    assert len(saved) == 1
    assert torch.equal(x.grad, x.detach().cos())
