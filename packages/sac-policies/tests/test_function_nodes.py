"""Classes of nodes and the autograd functions that make them."""

from __future__ import annotations

from typing import Any

import torch

from sac_policies._torch_compat._function_nodes import function_of, nodes_of


class Same(torch.autograd.Function):
    """Return a copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Copy it."""
        return x.clone()


def test_nodes_lead_to_their_function_and_back() -> None:
    """Those of torch lead nowhere."""
    x = torch.ones(2, requires_grad=True)
    made, other = Same.apply(x), x.sin()
    assert function_of(type(made.grad_fn)) is Same
    assert nodes_of(Same) is type(made.grad_fn)
    assert function_of(type(other.grad_fn)) is None
