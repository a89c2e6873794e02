"""Changes of a tensor that no version counter shows."""

from __future__ import annotations

import torch


def add(tensor: torch.Tensor) -> None:
    """Write past the version counter."""
    tensor.data.add_(0.25)


def negate(tensor: torch.Tensor) -> None:
    """Change every sign, unseen."""
    tensor.data.neg_()


def fresh(tensor: torch.Tensor) -> None:
    """Give other data of the same shape."""
    tensor.data = tensor.data * 0.5


def larger(tensor: torch.Tensor) -> None:
    """Give data of another shape."""
    tensor.data = tensor.data.new_ones(tensor.shape[0] + 1, *tensor.shape[1:])


def one_element(tensor: torch.Tensor) -> None:
    """Write one element through NumPy."""
    tensor.detach().numpy().reshape(-1)[-1] += 1


UNSEEN = [add, negate, fresh, larger, one_element]
