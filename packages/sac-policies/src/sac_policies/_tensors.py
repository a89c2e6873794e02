"""Finds tensors in nested containers: arguments, results, batches."""

from __future__ import annotations

from typing import Any

import torch

from ._torch_compat import tree_leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested containers, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def needing_gradients(value: Any) -> tuple[bool, ...]:
    """Tell of each tensor in nested containers whether it needs a gradient, in order."""
    return tuple(tensor.requires_grad for tensor in tensors_in(value))
