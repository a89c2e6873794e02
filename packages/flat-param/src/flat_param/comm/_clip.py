"""The norm of gradients that are sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import StateError
from .._torch_compat import norms_of, without_torch_function
from ..buffers._dtensors import DTensorPlace, local_of
from ._comm import CommLog, Communicator

_DOUBLE = (torch.float64, torch.complex128)

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
def norm_over(parts: Iterable[tuple[Spread, Spread, Tensor | None]], norm_type: float) -> Tensor:
    """The norm of gradients over ranks, `()`; float64 if a gradient is. Collective.

    Norms are added in float64, on ranks without gradients too.

    Args:
        parts: for each gradient, in an order that is the same on all ranks: communicators over
            which it is cut; communicators to ranks with separate ones, of which the largest norm
            counts; the gradient. It is None on a rank that has none and takes part.
        norm_type: order of the norm.
    """
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    lists: dict[object, tuple[Spread, Spread, list[Tensor]]] = {}
    for cut, beside, grad in parts:
        key = _groups_of(cut), _groups_of(beside)
        _, _, grads = lists.setdefault(key, (cut, beside, []))
        grads += [] if grad is None else [grad]
    sums, is_double = [], False
    for cut, beside, grads in lists.values():
        is_double = is_double or any(grad.dtype in _DOUBLE for grad in grads)
        total = _power_sum(grads, norm_type)
        for comms, how in ((cut, op), (beside, dist.ReduceOp.MAX)):
            for comm in comms:
                comm.all_reduce(total, how, of_unit=False).wait()
        sums.append(total)
    return _root(sums, norm_type).to(torch.float64 if is_double else torch.float32)


def _groups_of(comms: Spread) -> tuple[object, ...]:
    return tuple([comm.group for comm in comms if comm.group is not None])


def spread_of(place: DTensorPlace | None, log: CommLog) -> Spread:
    """Communicators over which tensor parallelism cuts a tensor with these placements."""
    groups = () if place is None else place.groups
    return tuple(Communicator(each, log=log) for each in groups)


def _power_sum(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of |g|^p, or the largest |g| for an infinite p; `()`."""
    filled = [grad for grad in grads if grad.numel()]
    if not filled:
        device = grads[0].device if grads else torch.get_default_device()
        return torch.zeros((), dtype=_wide(device), device=device)
    wide = _wide(filled[0].device)
    with without_torch_function():  # pieces of gradients refuse to be reduced
        norms = torch.stack([norm.to(wide) for norm in norms_of(filled, norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _wide(device: torch.device) -> torch.dtype:
    """The dtype in which norms are added: the widest that the device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def _root(sums: list[Tensor], norm_type: float) -> Tensor:
    if not sums:
        return torch.zeros(())
    device = sums[0].device
    stacked = torch.stack([one.to(device) for one in sums])
    return stacked.max() if math.isinf(norm_type) else stacked.sum().pow(1 / norm_type)
