"""Keeps torch's own functions from being wrong on sharded parameters without a word.

Rule 1: `torch.nn.utils.clip_grad_norm_` gives the norm over all ranks. It is a collective then:
        every rank that was given a gradient joins. Where parameters are cut between elements each
        has a (perhaps empty) piece of all; where tensors or rows stay whole a rank may have none of
        them, and only the module's own `clip_grad_norm_` knows that it has to join.
Rule 2: an optimizer that needs whole tensors fails where it calls a function that reads them, see
        _piece_tensors.py.
Rule 3: steps of optimizers on sharded parameters are counted. Fused ones change values without a
        word to torch's version counters, and a rank that has no piece of a parameter sees no change
        of it; but all ranks make the same steps.
Rule 4: an optimizer that was made before sharding and has DTensors refuses to step: plain
        parameters took their place.
Rule 5: an overflow that `torch.amp.GradScaler` finds on one rank is one on all that share the unit,
        which skip the step together.
Rule 6: an optimizer whose state is of whole parameters refuses to step on pieces of them.
Rule 7: `optimizer.state_dict()` says which elements its state is of, see _optim_state.py.
All are installed once, at the first `fully_shard`, and change nothing for other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import utils
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
from ._optim_state import install_state_hooks, piece_of
from ._param_piece import ParamPiece
from ._piece_tensors import be_piece

UNMARKED = ("", 1)  # name, number of ranks

_steps = [0]
_any_replaced = [False]
_ALONE = Communicator(None, log=CommLog())


@cache
def install_guards() -> None:
    """Install the guards; a second call does nothing."""
    register_optimizer_step_pre_hook(_refuse_replaced)
    _loaded_states.install()
    register_optimizer_step_post_hook(_count_step)
    install_state_hooks()
    if not replace_unscale(_found_by_all):
        scaler: Any = torch.amp.GradScaler
        scaler.step = _refuse_to_scale(scaler.step)
    if not replace_total_norm(_over_ranks):
        utils.clip_grad_norm_ = _refuse_cut_grads(utils.clip_grad_norm_)


def mark_param(
    param: nn.Parameter,
    *,
    name: str,
    world_size: int,
    comms: Spread = (),
    whole: tuple[int, ...] | None = None,
    piece: ParamPiece | None = None,
) -> None:
    """Tell the guards what a parameter is a piece of, and which ranks step it together.

    Args:
        param: this rank's piece.
        name: in its unit.
        world_size: number of ranks that it is spread over.
        comms: to the ranks that step it together.
        whole: shape of the whole parameter.
        piece: what the parameter is a piece of, see `ParamPiece`.
    """
    param._flat_param_mark = (name, world_size)  # type: ignore[attr-defined]  # ours
    param._flat_param_ranks = comms  # type: ignore[attr-defined]  # our own mark
    param._flat_param_whole = whole  # type: ignore[attr-defined]  # our own mark
    if isinstance(piece, ParamPiece):
        be_piece(param, piece)
    _loaded_states.forget()


def mark_replaced(param: Tensor, *, name: str) -> None:
    """Tell the guards of a parameter that is the module's no more."""
    param._flat_param_replaced = name  # type: ignore[attr-defined]  # our own mark
    _any_replaced[0] = True


def mark_grad(grad: Tensor, comms: Spread) -> None:
    """Tell the guards over which ranks a gradient is spread, if over several."""
    if any(comm.world_size > 1 for comm in comms):
        grad._flat_param_comms = comms  # type: ignore[attr-defined]  # our own mark


def optimizer_steps() -> int:
    """How many steps optimizers of this process have made on sharded parameters (Rule 3)."""
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
    """Rule 1, around torch's own norm."""

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
    """Gradients by the ranks over which they are spread, in order of first appearance."""
    known: dict[object, Spread] = {}
    lists: dict[Spread, list[Tensor]] = {}
    for grad in grads:
        comms: Spread = getattr(grad, "_flat_param_comms", (_ALONE,))
        first = known.setdefault(groups_of(comms), comms)
        lists.setdefault(first, []).append(grad)
    return lists


def groups_of(comms: Spread) -> tuple[object, ...]:
    """What two spreads have alike where they are over the same ranks."""
    return tuple(comm.group for comm in comms)


def _refuse_cut_grads(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rule 1 where torch's norm cannot be wrapped: say so instead of being wrong."""

    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if spread := _first_spread(params):
            name, world_size = spread
            raise ParameterError(
                f"flat_param.clip_grad_norm_: parameter '{name}' is spread over {world_size} "
                "ranks, but torch would take the norm of this rank's piece. "
                "Use module.clip_grad_norm_."
            )
        return original(params, *args, **kwargs)

    return clip_grad_norm_


def _found_by_all(original: Callable[..., dict[Any, Tensor]]) -> Callable[..., dict[Any, Tensor]]:
    """Rule 5, around the search for overflow. Collective then."""

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
            found.setdefault(found_inf.device, largest)  # a rank may have nothing of any parameter
        return found

    return unscale_grads_


def _refuse_to_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rule 5 where torch's search cannot be wrapped: say so instead of stepping on some ranks."""

    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if spread := _first_spread(_params_of(optimizer)):
            name, world_size = spread
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' is spread over {world_size} "
                "ranks, but this torch's GradScaler would look for an overflow in this "
                "rank's piece. Train in bfloat16, which needs no scaling."
            )
        return original(scaler, optimizer, *args, **kwargs)

    return step


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer that has replaced parameters (Rule 4)."""
    for param in _params_of(optimizer) if _any_replaced[0] else ():
        if hasattr(param, "_flat_param_replaced"):
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{param._flat_param_replaced}' was a "
                "DTensor that the optimizer still has, but a plain one took its place. Make "
                "the optimizer after fully_shard."
            )


def _params_of(optimizer: Optimizer) -> Iterator[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _first_spread(params: Iterable[Tensor]) -> tuple[str, int] | None:
    """Name and number of ranks of the first parameter that more than one rank has a piece of."""
    marks = (getattr(param, "_flat_param_mark", UNMARKED) for param in params)
    return next(((name, size) for name, size in marks if size > 1), None)


def _not_of_piece(param: Any, key: str, shape: tuple[int, ...]) -> StateError:
    """What Rule 6 says."""
    name, *_ = param._flat_param_mark
    return StateError(
        f"flat_param.fully_shard: optimizer state '{key}' of parameter '{name}' has shape {shape}, "
        f"but this rank's piece has {tuple(param.shape)}: it is of whole parameters. Nothing was "
        "stepped. Load it with flat_param.load_full_state_dict(module, {'model': ..., "
        "'optim': state}, optimizer=optimizer)."
    )


_loaded_states = LoadedStates("_flat_param_mark", _not_of_piece, "_flat_param_whole")
