"""Norms of vectors that are too long for one float32 sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements


def joint_norm(vectors: Sequence[Tensor], ord: float) -> Tensor:
    """Return the norm of several vectors as one; a 0-dim tensor; zero for no vectors."""
    held = [vector for vector in vectors if vector.numel()]  # some orders raise for empty vectors
    if not held:
        return torch.linalg.vector_norm(vectors[0]) if vectors else torch.tensor(0.0)
    norms = [_norm(vector, ord) for vector in held]
    if len(norms) == 1:
        return norms[0]
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return _norm_of_norms(torch.stack([norm.to(wide) for norm in norms]), ord)


def _norm(vector: Tensor, ord: float) -> Tensor:
    """Return the norm of block norms: one float32 sum over ten million squares is off by 3e-4."""
    blocks = vector.numel() // _BLOCK
    if blocks < 4:
        return torch.linalg.vector_norm(vector, ord)
    whole = blocks * _BLOCK
    norms = torch.linalg.vector_norm(vector[:whole].view(blocks, -1), ord, dim=1)
    if whole < vector.numel():
        rest = torch.linalg.vector_norm(vector[whole:], ord)
        norms = torch.cat([norms, rest.view(1)])
    return _norm_of_norms(norms, ord)


def _norm_of_norms(norms: Tensor, ord: float) -> Tensor:
    """Combine the norms of disjoint parts. Order 0 counts nonzero elements, so these add up."""
    return norms.sum() if ord == 0 else torch.linalg.vector_norm(norms, ord)
