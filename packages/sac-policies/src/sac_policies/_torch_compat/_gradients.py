"""Hooks on accumulated gradients, and the leaves of a graph."""

from __future__ import annotations

from typing import Any

import torch


def post_accumulate_hooks(leaf: torch.Tensor) -> dict[int, Any] | None:
    """Return the hooks of a leaf's `register_post_accumulate_grad_hook`; None without any."""
    return leaf._post_accumulate_grad_hooks


def set_post_accumulate_hooks(leaf: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Replace the hooks of a leaf's `register_post_accumulate_grad_hook`."""
    leaf._post_accumulate_grad_hooks = hooks


def optimizers_in_backward(parameter: torch.Tensor) -> list[Any]:
    """Return the optimizers that `apply_optimizer_in_backward` made for a parameter."""
    found: list[Any] = getattr(parameter, "_in_backward_optimizers", [])
    return found


def set_optimizers_in_backward(parameter: torch.Tensor, optimizers: list[Any]) -> None:
    """Replace the optimizers that `apply_optimizer_in_backward` made for a parameter."""
    parameter._in_backward_optimizers = optimizers  # type: ignore[attr-defined]


def graph_leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that a backward from `result` gives gradients to."""
    found, waiting = list[torch.Tensor](), [result.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)  # type: ignore[attr-defined]  # of this class
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return [result] if result.grad_fn is None and result.requires_grad else found
