"""Layer norm, whose node does not know the eps it was given.

Its output is continued from the mean and the deviation that it saved, in three operators. In
place of these the operator itself is called with an eps that others use, as long as that gives
the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...._torch_compat import is_fake
from .._replay import Node

_USUAL = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3)
"""What torch, and models written with it, give for eps."""


def from_statistics(node: Node) -> torch.Tensor:
    """Continue from mean and rstd, in their dtype: eps is not saved.

    The kernel multiplies and adds in one rounding, as addcmul does.
    """
    mean, rstd = node._saved_result1, node._saved_result2
    x, weight, bias = node._saved_input.contiguous(), node._saved_weight, node._saved_bias
    y = (x - mean).mul_(rstd)
    if weight is not None and bias is not None:
        y = torch.addcmul(bias, y, weight)
    elif weight is not None:
        y.mul_(weight)
    elif bias is not None:
        # Some kernels round once here, so the operator itself is called if its eps is usual.
        shape = node._saved_normalized_shape
        eps = _eps_of(x, shape, rstd, (*_USUAL, *_near(x, shape, rstd)))
        if eps is not None:
            return torch.layer_norm(x, shape, None, bias, eps)
        y = y + bias
    return y if y.dtype is x.dtype else y.to(x.dtype)


class EpsGuess:
    """Calls layer norm with the eps that norms of this shape were found to have."""

    def __init__(self) -> None:
        self._eps: dict[Any, float | None] = {}

    def __call__(self, node: Node) -> torch.Tensor | None:
        """Return what is probably the output; None where no usual eps gives what was saved."""
        shape = node._saved_normalized_shape
        eps = self._eps.get(shape, 0.0)
        if eps is None:
            return None
        x = node._saved_input
        if eps == 0.0:
            eps = self._eps[shape] = _eps_of(x, shape, node._saved_result2, _USUAL)
            if eps is None:
                return None
        return torch.layer_norm(x, shape, node._saved_weight, node._saved_bias, eps)

    def missed(self, node: Node) -> None:
        """Guess no more for norms of this shape: they have another eps, or several."""
        self._eps[node._saved_normalized_shape] = None


def _eps_of(
    x: torch.Tensor, shape: Any, rstd: torch.Tensor, candidates: Iterable[float]
) -> float | None:
    """Find the eps that gives this deviation."""
    for eps in candidates:
        if torch.equal(torch.native_layer_norm(x, shape, None, None, eps)[2], rstd):
            return eps
    return None


def _near(x: torch.Tensor, shape: Any, rstd: torch.Tensor) -> Iterator[float]:
    """Numbers of one to three digits near what the variance lacks of the deviation's square."""
    if not x.numel() or is_fake(x):
        return
    over = tuple(range(-len(shape), 0))
    variance = x.double().var(over, correction=0, keepdim=True)
    found = (rstd.double() ** -2 - variance).median().item()
    if math.isfinite(found):
        yield from (float(f"{found:.{digits}e}") for digits in range(3))
