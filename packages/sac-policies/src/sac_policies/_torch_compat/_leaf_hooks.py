"""Hooks of leaves, which torch 2.9 takes away when Python reads what a node saved of a leaf."""

from __future__ import annotations

from typing import Any

import torch


def _forgets_hooks() -> bool:
    """Whether a leaf loses its hooks where a node gives back in Python what it saved of it."""
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            leaf = torch.ones(1, device="cpu", requires_grad=True)
            made = leaf.sin()
        seen: list[torch.Tensor] = []
        leaf.register_hook(seen.append)
        getattr(made.grad_fn, "_saved_self")  # noqa: B009 - to a checker a node saves nothing
        made.backward()
    except (AttributeError, RuntimeError):
        return False
    return not seen


FORGETS_HOOKS = _forgets_hooks()
"""torch 2.9: a copy of a leaf shares its accumulator, and clears the leaf's hooks when it goes."""


def restore_hooks(node: Any) -> None:
    """Give the leaves that a node reads the hooks back that reading what it saved took away."""
    for function, _ in node.next_functions if FORGETS_HOOKS else ():
        leaf = getattr(function, "variable", None)
        if leaf is not None and leaf._backward_hooks:
            leaf._backward_hooks = leaf._backward_hooks  # registers them again
