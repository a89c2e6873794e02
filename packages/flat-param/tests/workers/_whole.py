"""Gradients and memory of a sharded model, as one process sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _harness import distance, loss_of, share, whole, whole_state
from torch import Tensor, nn

from flat_param.plan import CommCount


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient as a whole tensor; zero where there is none."""
    kept = {param: param.detach().clone() for param in model.parameters()}
    for param in kept:
        param.data.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    grads = {k: v.clone() for k, v in whole_state(model).items() if k != "scale"}
    for param, values in kept.items():
        param.data.copy_(values)
    return grads


def plain_grads(model: nn.Module) -> dict[str, Tensor]:
    """The same of a plain module, or of FSDP2's."""
    named = model.named_parameters()
    return {n: whole(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in named}


def same_grads(model: nn.Module, reference: nn.Module) -> None:
    """Assert that gradients are the plain module's up to rounding. Collective."""
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def same_step(model: nn.Module, reference: nn.Module, ids: Tensor, rank: int) -> int:
    """Assert so of one step, which leaves nothing whole. Collective.

    Returns:
        How many gathers there were since the last count.
    """
    model.zero_grad()
    reference.zero_grad()
    loss_of(model, share(ids, rank)).backward()
    gathers: int = model.comm_counts().get("all_gather", CommCount()).calls
    loss_of(reference, ids).backward()
    same_grads(model, reference)
    assert whole_bytes(model) == 0
    model.comm_counts()
    return gathers


def note(seen: list[int], count: Callable[[nn.Module], int], model: nn.Module, *_: Any) -> None:
    """A hook that notes how much is whole."""
    seen.append(count(model))


def whole_bytes(model: nn.Module) -> int:
    """Bytes of whole parameters that are not the shard itself."""
    parts = [part for unit in model._flat_param.schedule.units for part in unit.parts]
    return sum(part.full.untyped_storage().nbytes() for part in parts if not part.aliased)


def whole_grad_bytes(model: nn.Module) -> int:
    """Bytes of this rank's gradients that are not summed yet."""
    grads = [each for unit in model._flat_param.schedule.units for each in unit.trained]
    return sum(each.arriving.nbytes for each in grads if each.arriving is not None)
