"""The norm of gradients that are sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import StateError
from .._torch_compat import norms_of, without_torch_function
from ..buffers._dtensors import DTensorPlace, local_of
from ._comm import CommLog, Communicator

Spread = tuple[Communicator, ...]
"""Communicators over which a gradient is cut: of the unit, and of tensor parallelism."""


@torch.no_grad()
def clip_(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose norm is `norm`, so that it becomes at most `max_norm`."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in map(local_of, grads):
        grad.mul_(scale.to(device=grad.device, dtype=grad.real.dtype))


def checked_norms(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Convert both to numbers; texts such as "inf" are accepted."""
    try:
        most, order = float(max_norm), float(norm_type)
    except (TypeError, ValueError):
        most = order = math.nan
    if not most >= 0 or math.isnan(order) or not order:
        raise StateError(
            f"flat_param.clip_grad_norm_: max_norm is {max_norm!r} and norm_type {norm_type!r}. "
            "Pass a max_norm of at least 0, and a norm_type such as 2.0 or 'inf'. The module's own "
            "method takes no parameters: it clips all of them."
        )
    return most, order


@torch.no_grad()
def norm_over(
    spread: Iterable[tuple[Spread, list[Tensor]]],
    norm_type: float,
    *,
    apart: Iterable[tuple[Spread, Spread, list[Tensor]]] = (),
) -> Tensor:
    """The norm of pieces of gradients, each list spread over its communicators. Collective."""
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    sums = [_sum_over(comms, grads, norm_type, op) for comms, grads in spread]
    for cut, own, grads in apart:
        sums.append(_sum_over(cut, grads, norm_type, op))
        for comm in own:
            comm.all_reduce(sums[-1], dist.ReduceOp.MAX, of_unit=False).wait()
    return _root(sums, norm_type)


def spread_of(place: DTensorPlace | None, log: CommLog) -> Spread:
    """Communicators over which tensor parallelism cuts a tensor with these placements."""
    groups = () if place is None else place.groups
    return tuple(Communicator(each, log=log) for each in groups)


def _sum_over(comms: Spread, grads: list[Tensor], norm_type: float, op: Any) -> Tensor:
    total = _power_sum(grads, norm_type)
    for comm in comms:
        comm.all_reduce(total, op, of_unit=False).wait()
    return total


def _power_sum(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of |g|^p, or the largest |g| for an infinite p; `()`, float32."""
    filled = [grad for grad in grads if grad.numel()]
    if not filled:
        return torch.zeros((), device=grads[0].device if grads else None)
    with without_torch_function():  # pieces of gradients refuse to be reduced
        norms = torch.stack([norm.float() for norm in norms_of(filled, norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _root(sums: list[Tensor], norm_type: float) -> Tensor:
    if not sums:
        return torch.zeros(())
    device = sums[0].device
    stacked = torch.stack([one.to(device) for one in sums])
    return stacked.max() if math.isinf(norm_type) else stacked.sum().pow(1 / norm_type)
