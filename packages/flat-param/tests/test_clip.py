"""The norm of gradients that are spread over ranks, one rank at a time."""

from __future__ import annotations

import math

import pytest
import torch

from flat_param import _torch_compat
from flat_param.comm import _clip


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("at_once", [True, False])
def test_norm_of_pieces_is_that_of_the_whole(
    order: float, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty pieces count for nothing; where torch has no norm of many, each is asked."""
    if not at_once:
        monkeypatch.delattr(torch, "_foreach_norm")
    grads = [torch.linspace(-2, 1, numel).to(kind) for numel, kind in PIECES]
    whole = torch.cat([grad.double() for grad in grads])
    total = _clip._power_sum(grads, order)
    assert total.dtype is torch.float32
    found = _clip._root([total, torch.zeros(())], order)
    expected = torch.linalg.vector_norm(whole, order).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


PIECES = ((5, torch.float32), (0, torch.float32), (3, torch.float64), (0, torch.float64))


def test_norms_of_one_and_of_many_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback gives what torch's function of many tensors gives."""
    tensors = [torch.linspace(-1, 3, numel) for numel in (1, 7, 64)]
    many = _torch_compat.norms_of(tensors, 2.0)
    monkeypatch.delattr(torch, "_foreach_norm")
    torch.testing.assert_close(list(many), list(_torch_compat.norms_of(tensors, 2.0)))


def test_norm_of_nothing_is_zero() -> None:
    """A rank that holds no gradient takes part with a zero."""
    assert _clip._power_sum([], 2.0).item() == 0
    assert _clip._power_sum([torch.empty(0)], math.inf).item() == 0
