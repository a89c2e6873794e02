"""Norms of vectors that are too long for one float32 sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements


def joint_norm(vectors: Sequence[Tensor], ord: float) -> Tensor:
    """The norm of several vectors as one; a 0-dim tensor; that of none is zero."""
    if not vectors:
        return torch.tensor(0.0)
    norms = [_norm(vector, ord) for vector in vectors]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), ord)


def _norm(vector: Tensor, ord: float) -> Tensor:
    """The norm of block norms: one float32 sum over ten million squares is off by 3e-4."""
    blocks = vector.numel() // _BLOCK
    if blocks < 4 or ord == 0:
        return torch.linalg.vector_norm(vector, ord)
    whole = blocks * _BLOCK
    rows = torch.linalg.vector_norm(vector[:whole].view(blocks, -1), ord, dim=1)
    rest = torch.linalg.vector_norm(vector[whole:], ord)
    return torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]), ord)
