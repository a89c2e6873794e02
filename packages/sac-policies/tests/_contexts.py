"""A region under the contexts engine, and two matrices to give to it."""

from __future__ import annotations

import torch

from sac_policies import checkpoint, save_ops

PRODUCTS = save_ops("aten.mm")


def ab() -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of (8, 8), the same in every test."""
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def contexts(function, *args, policy, **kwargs):
    """Call under the contexts engine."""
    return checkpoint(function, *args, policy=policy, engine="contexts", **kwargs)
