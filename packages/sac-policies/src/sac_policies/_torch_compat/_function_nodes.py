"""Which class of nodes belongs to which autograd function, where torch tells."""

from __future__ import annotations

import torch


def function_of(kind: type) -> type[torch.autograd.Function] | None:
    """The autograd function that makes nodes of a class; None for torch's own nodes."""
    return getattr(kind, "_forward_cls", None)


def nodes_of(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes that an autograd function makes."""
    kind: type = getattr(function, "_backward_cls")  # noqa: B009 - not in torch's stubs
    return kind
