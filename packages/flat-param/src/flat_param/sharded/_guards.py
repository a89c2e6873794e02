"""Wraps torch's functions that would be silently wrong on sharded parameters.

- `torch.nn.utils.clip_grad_norm_` computes the norm over all ranks, as a collective of the ranks
  that pass gradients. If rows or tensors stay whole, a rank may have none; only the module's own
  `clip_grad_norm_` makes it join.
- If `torch.amp.GradScaler` finds an overflow on one rank, all ranks of the unit skip the step.
- Optimizer steps are checked, see _first_step.py, and counted: fused ones do not change version
  counters, and a rank without a piece sees no change of a parameter.
- `optimizer.state_dict()` returns shards, see _optim_state.py.

All are installed at the first `fully_shard`, and change nothing for other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._torch_compat import replace_total_norm, replace_unscale
from ..buffers._dtensors import place_of_dtensor
from ..comm._clip import Spread, norm_over, spread_of
from ..comm._groups import CommGroups
from ._first_step import check_first_step, checked
from ._optim_state import install_state_hooks, params_of
from ._param_piece import piece_of


def install_guards() -> None:
    """Install the guards at the first call, and check all optimizers again after each."""
    _install_once()
    checked.clear()


@cache
def _install_once() -> None:
    register_optimizer_step_pre_hook(check_first_step)
    register_optimizer_step_post_hook(_count_step)
    install_state_hooks()
    replace_unscale(_found_by_all)
    replace_total_norm(_over_ranks)


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(optimizer, "steps_bucket", False):
        pieces = [piece_of(param) for param in params_of(optimizer)]
        for segment in {piece.segment for piece in pieces if piece is not None}:
            segment.steps += 1


def _over_ranks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's norm, over ranks for sharded gradients."""

    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        pieces = [piece_of(grad) for grad in grads]
        spread = [() if piece is None else piece.spread for piece in pieces]
        if all(comm.world_size == 1 for comms in spread for comm in comms):
            return original(grads, norm_type, error_if_nonfinite, foreach)
        parts = [(cut, (), grad) for cut, grad in zip(spread, grads, strict=True)]
        norm = norm_over(parts, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"flat_param.clip_grad_norm_: the norm of order {norm_type} is {norm.item()}, but "
                "error_if_nonfinite=True asks for a finite one. Look for the overflow."
            )
        return norm

    return total_norm


def norm_parts(
    params: Iterable[Tensor], *, ignored: Sequence[Tensor], comms: CommGroups
) -> Iterator[tuple[Spread, Spread, Tensor | None]]:
    """Gradients for `norm_over`. Each rank has separate ones of `ignored` parameters."""
    known = set(map(id, ignored))
    for param in params:
        piece, grad = piece_of(param), param.grad
        if piece is not None:  # without elements a rank may have no gradient, and takes part
            yield piece.spread, (), grad
        elif grad is not None or id(param) in known:
            place = place_of_dtensor(param)
            local = grad if grad is None or place is None else place.local_of_grad(grad)
            beside = (comms.reduce, comms.replicate) if id(param) in known else ()
            yield spread_of(place, comms.log), beside, local


def _found_by_all(original: Callable[..., dict[Any, Tensor]]) -> Callable[..., dict[Any, Tensor]]:
    """Combine the ranks' searches for an overflow. Collective."""

    def unscale_grads_(
        scaler: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *rest: Any
    ) -> dict[Any, Tensor]:
        found = original(scaler, optimizer, inv_scale, found_inf, *rest)
        pieces = [piece_of(param) for param in params_of(optimizer)]
        ranks = {
            comm.group: comm
            for piece in pieces
            if piece is not None
            for comm in (*piece.spread, piece.segment.replicate)
            if comm.world_size > 1
        }
        if ranks:
            known = [found_inf, *found.values()]
            largest = torch.stack([each.to(found_inf.device).view(()) for each in known]).amax()
            for comm in ranks.values():
                comm.all_reduce(largest, dist.ReduceOp.MAX, of_unit=False).wait()
            for each in found.values():
                each.copy_(largest)
            found.setdefault(found_inf.device, largest)  # a rank may have no piece of any parameter
        return found

    return unscale_grads_
