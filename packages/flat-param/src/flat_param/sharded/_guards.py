"""Wraps torch's functions that would be silently wrong on sharded parameters.

- `torch.nn.utils.clip_grad_norm_` computes the norm over all ranks, as a collective of the ranks
  that pass gradients. If rows or tensors stay whole, a rank may have none; only the module's own
  `clip_grad_norm_` makes it join.
- An optimizer that needs whole tensors raises where it reads them, see _piece_tensors.py and
  _first_step.py.
- Optimizer steps are counted: fused ones do not change version counters, and a rank without a piece
  sees no change of a parameter, but all ranks make the same steps.
- An optimizer that was made before sharding and still has DTensors refuses to step.
- If `torch.amp.GradScaler` finds an overflow on one rank, all ranks of the unit skip the step.
- An optimizer with state for full parameters refuses to step on pieces.
- `optimizer.state_dict()` names the elements of its state, see _optim_state.py.

All are installed at the first `fully_shard`, and change nothing for other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._errors import ParameterError, StateError
from .._torch_compat import replace_total_norm, replace_unscale
from ..buffers._loaded_state import LoadedStates
from ..comm._clip import Spread, norm_over
from ..comm._comm import CommLog, Communicator
from ._first_step import try_first_step
from ._optim_state import install_state_hooks, piece_of
from ._param_piece import ParamPiece
from ._piece_tensors import be_piece

_steps = [0]
_any_replaced = [False]
_ALONE = Communicator(None, log=CommLog())


@cache
def install_guards() -> None:
    """Install the guards; a second call does nothing."""
    register_optimizer_step_pre_hook(_refuse_replaced)
    _loaded_states.install()
    register_optimizer_step_pre_hook(try_first_step)
    register_optimizer_step_post_hook(_count_step)
    install_state_hooks()
    replace_unscale(_found_by_all)
    replace_total_norm(_over_ranks)


def mark_param(
    param: nn.Parameter,
    *,
    name: str,
    world_size: int,
    comms: Spread = (),
    whole: tuple[int, ...] | None = None,
    piece: ParamPiece | None = None,
) -> None:
    """Mark a parameter with its piece and the ranks that step it together."""
    param._flat_param_mark = (name, world_size)  # type: ignore[attr-defined]  # ours
    param._flat_param_ranks = comms  # type: ignore[attr-defined]  # our own mark
    param._flat_param_whole = whole  # type: ignore[attr-defined]  # our own mark
    if isinstance(piece, ParamPiece):
        be_piece(param, piece)
    _loaded_states.forget()


def mark_replaced(param: Tensor, *, name: str) -> None:
    """Mark a parameter that was replaced in its module."""
    param._flat_param_replaced = name  # type: ignore[attr-defined]  # our own mark
    _any_replaced[0] = True


def mark_grad(grad: Tensor, comms: Spread) -> None:
    """Mark a gradient with the ranks over which it is spread, if there are several."""
    if any(comm.world_size > 1 for comm in comms):
        grad._flat_param_comms = comms  # type: ignore[attr-defined]  # our own mark


def optimizer_steps() -> int:
    """How many steps optimizers of this process have made on sharded parameters."""
    return _steps[0]


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "steps_bucket", False):
        return
    pieces = [piece for piece in map(piece_of, _params_of(optimizer)) if piece is not None]
    for piece in pieces:
        piece.is_stepped |= piece.has_grad
    for segment in {piece.segment for piece in pieces}:
        segment.steps += 1
    _steps[0] += any(hasattr(param, "_flat_param_mark") for param in _params_of(optimizer))


def _over_ranks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's norm, over ranks for marked gradients."""

    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        spread = by_comm(grads)
        if all(comm.world_size == 1 for comms in spread for comm in comms):
            return original(grads, norm_type, error_if_nonfinite, foreach)
        norm = norm_over(spread.items(), float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"flat_param.clip_grad_norm_: the norm of order {norm_type} is {norm.item()}, but "
                "error_if_nonfinite=True asks for a finite one. Look for the overflow."
            )
        return norm

    return total_norm


def by_comm(grads: list[Tensor]) -> dict[Spread, list[Tensor]]:
    """Group gradients by the ranks over which they are sharded, in order of first appearance."""
    known: dict[object, Spread] = {}
    lists: dict[Spread, list[Tensor]] = {}
    for grad in grads:
        comms: Spread = getattr(grad, "_flat_param_comms", (_ALONE,))
        first = known.setdefault(groups_of(comms), comms)
        lists.setdefault(first, []).append(grad)
    return lists


def groups_of(comms: Spread) -> tuple[object, ...]:
    """A key for the ranks of a spread; equal for equal ranks."""
    return tuple(comm.group for comm in comms)


def _found_by_all(original: Callable[..., dict[Any, Tensor]]) -> Callable[..., dict[Any, Tensor]]:
    """Combine the ranks' searches for an overflow. Collective."""

    def unscale_grads_(
        scaler: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *rest: Any
    ) -> dict[Any, Tensor]:
        found = original(scaler, optimizer, inv_scale, found_inf, *rest)
        ranks = {
            comm.group: comm
            for param in _params_of(optimizer)
            for comm in getattr(param, "_flat_param_ranks", ())
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


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer that has replaced parameters."""
    for param in _params_of(optimizer) if _any_replaced[0] else ():
        if hasattr(param, "_flat_param_replaced"):
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{param._flat_param_replaced}' was a "
                "DTensor that the optimizer still has, but a plain one took its place. Make "
                "the optimizer after fully_shard."
            )


def _params_of(optimizer: Optimizer) -> Iterator[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _not_of_piece(param: Any, key: str, shape: tuple[int, ...]) -> StateError:
    """The error for state of whole parameters."""
    name, *_ = param._flat_param_mark
    return StateError(
        f"flat_param.fully_shard: optimizer state '{key}' of parameter '{name}' has shape {shape}, "
        f"but this rank's piece has {tuple(param.shape)}: it is of whole parameters. Nothing was "
        "stepped. Load it with flat_param.load_full_state_dict(module, {'model': ..., "
        "'optim': state}, optimizer=optimizer)."
    )


_loaded_states = LoadedStates("_flat_param_mark", _not_of_piece, "_flat_param_whole")
