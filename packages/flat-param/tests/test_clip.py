"""The norm of gradients that are spread over ranks, one rank at a time."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from flat_param import StateError, fully_shard
from flat_param.comm import _clip


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
def test_norm_of_pieces_is_that_of_the_whole(order: float) -> None:
    """Empty pieces count for nothing."""
    grads = [torch.linspace(-2, 1, numel).to(kind) for numel, kind in PIECES]
    whole = torch.cat([grad.double() for grad in grads])
    total = _clip._power_sum(grads, order)
    assert total.dtype is torch.float32
    found = _clip._root([total, torch.zeros(())], order)
    expected = torch.linalg.vector_norm(whole, order).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


PIECES = ((5, torch.float32), (0, torch.float32), (3, torch.float64), (0, torch.float64))


def test_norm_of_nothing_is_zero() -> None:
    """A rank that holds no gradient takes part with a zero."""
    assert _clip._power_sum([], 2.0).item() == 0
    assert _clip._power_sum([torch.empty(0)], math.inf).item() == 0


@pytest.mark.parametrize(
    ("max_norm", "norm_type"),
    [(-1.0, 2), (math.nan, 2), ("a", 2), (None, 2), (1.0, 0), (1.0, math.nan), (1.0, "two")],
)
def test_norm_that_nothing_is_scaled_to_is_refused(
    group_of_one: None, max_norm: Any, norm_type: Any
) -> None:
    """A negative one would turn the gradients around; they stay."""
    module = fully_shard(nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    before = [param.grad.clone() for param in module.parameters() if param.grad is not None]
    text = f"max_norm is {max_norm!r} and norm_type {norm_type!r}. Pass a max_norm"
    with pytest.raises(StateError, match=re.escape(text)):
        module.clip_grad_norm_(max_norm, norm_type)
    after = [param.grad for param in module.parameters() if param.grad is not None]
    assert all(map(torch.equal, before, after))


def test_order_may_be_the_word_that_torch_takes(group_of_one: None) -> None:
    """For the largest gradient."""
    module = fully_shard(nn.Linear(2, 2))
    (3 * module(torch.ones(1, 2)).sum()).backward()
    assert module.clip_grad_norm_(1.0, "inf") == 3
