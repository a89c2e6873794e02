"""Torch: the reentrant implementation, for any arguments and any result.

`torch.utils.checkpoint` sees tensors only where they are arguments or results themselves, so
the tensors of a call are handed to it one by one and put back into place inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckpt_wrap._tree import fill, flatten


def checkpoint_reentrant(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    templates: tuple[Any, Any],
    preserve_rng_state: bool,
) -> Any:
    """Call `function` with the arguments the templates describe, reentrantly.

    Where no tensor requires grad, parameters of the function still get theirs. A tensor passed
    twice is one tensor inside too, so that its gradients add up in the order they always do.
    """
    template: Any = None
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    position = {id(tensor): index for index, tensor in enumerate(unique)}
    order = [position[id(tensor)] for tensor in tensors]

    def call(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal template
        inputs = [flat[index] for index in order]
        found: list[torch.Tensor] = []
        template = flatten(
            function(*fill(templates[0], inputs), **fill(templates[1], inputs)), found
        )
        return tuple(found)

    results = torch_checkpoint(
        call,
        *unique,
        *_anchor(unique),
        use_reentrant=True,
        preserve_rng_state=preserve_rng_state,
    )
    return fill(template, results)


def _anchor(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A tensor that requires grad, where a reentrant checkpoint would otherwise see none."""
    if any(tensor.requires_grad for tensor in tensors):
        return ()
    return (torch.empty(0, requires_grad=True),)
