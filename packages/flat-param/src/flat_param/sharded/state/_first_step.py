"""Hooks around each optimizer step: public ones of torch, for all optimizers.

- At the first step of an optimizer that was made before sharding, its state dicts are made to have
  shards, see _optim_state.py, and its state is cut.
- An optimizer that needs whole tensors is refused where it reads a piece, see _piece_tensors.py. It
  may have updated other parameters before, and a rank without elements never reads the piece. So a
  copy of the optimizer is first stepped on an empty piece of each parameter that is cut: the
  refusal comes on all ranks, before anything has changed.
- A norm divided by a power of `numel()` is a root mean square, but `numel()` of a piece counts the
  elements of this rank. An optimizer that calls both is refused.
- Sizes of a piece cut at elements say nothing about the tensor. An optimizer that reads single ones
  is refused: Muon takes a matrix with one column for a vector, and steps it in another way.
- Steps are counted: fused ones do not change version counters, and a rank without a piece sees no
  change of a parameter.

Not tried: torch's own elementwise optimizers, which are never refused; optimizers whose options or
attributes are no plain values; a copy that fails in another way, such as without a closure.

Also refused are optimizers that send parameters between ranks, and those made before sharding that
have replaced parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..._errors import ParameterError
from ..._torch_compat import unhooked_step, without_torch_function
from ...buffers._optimizers import ELEMENTWISE, trial_of
from ..tensor._param_piece import PIECE, piece_of
from ..tensor._piece_tensors import as_piece, be_piece, plain
from ..tensor._reductions import Trial
from ._optim_state import follow, params_of, settle

_checked: WeakSet[Optimizer] = WeakSet()


def install_step_hooks() -> None:
    """Install the hooks at the first call, and check all optimizers again after each."""
    _install_once()
    _checked.clear()


@cache
def _install_once() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_count_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step that cannot be right."""
    if optimizer not in _checked:
        for param in params_of(optimizer):
            _check_param(optimizer, param)
        if not torch.compiler.is_compiling():
            _try_step(optimizer)
        if any(piece_of(param) is not None for param in params_of(optimizer)):
            follow(optimizer)
        _checked.add(optimizer)
    settle(optimizer)


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not hasattr(optimizer, "is_twin"):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        pieces = [getattr(param, PIECE, None) for param in params]
        for segment in {piece.segment for piece in pieces if piece is not None}:
            segment.steps += 1


def _check_param(optimizer: Optimizer, param: Any) -> None:
    from torch.distributed.algorithms.join import Joinable

    if hasattr(param, "_flat_param_shown"):
        raise ParameterError(
            f"flat_param.fully_shard: the optimizer was made while parameter "
            f"{param._flat_param_shown} was unsharded, so it would step a copy. Call reshard(), or "
            "leave whole_params(), before the optimizer is made."
        )
    if hasattr(param, "_flat_param_replaced"):
        raise ParameterError(
            f"flat_param.fully_shard: parameter '{param._flat_param_replaced}' was a DTensor or on "
            "meta, and the optimizer still has it, but another parameter took its place. Make the "
            "optimizer after fully_shard."
        )
    piece = piece_of(param)
    if piece is not None and piece.is_cut and isinstance(optimizer, Joinable):
        raise ParameterError(
            f"flat_param.fully_shard: {type(optimizer).__name__} sends parameters from rank to "
            f"rank, but each rank has another piece of parameter {piece.label}. Use a plain "
            "optimizer: its state is sharded as the parameters are."
        )


def _try_step(optimizer: Optimizer) -> None:
    """Raise the error that the step would raise on pieces."""
    kind = type(optimizer)
    if kind in ELEMENTWISE or hasattr(optimizer, "is_twin"):
        return
    params = [_emptied(group["params"]) for group in optimizer.param_groups]
    if not any(params):
        return
    Trial.is_on, Trial.called = True, set()
    try:
        unhooked_step(kind)(trial_of(optimizer, params))
    except ParameterError:
        raise
    except Exception:  # without elements or a closure, it may fail in any way
        pass
    finally:
        Trial.is_on = False
    label = next(piece.label for piece in map(piece_of, params_of(optimizer)) if piece)
    if "size" in Trial.called:
        raise ParameterError(
            f"flat_param.fully_shard: {kind.__name__} reads sizes of parameter {label}, as to tell "
            "matrices from vectors, but they are sizes of this rank's piece. Shard with "
            "boundary='tensor' for this optimizer. Nothing was stepped."
        )
    if Trial.called == {"reduction", "numel"}:
        raise ParameterError(
            f"flat_param.fully_shard: {kind.__name__} computes with a norm or a sum of parameter "
            f"{label} and with its numel(), as for a root mean square, but numel() counts the "
            "elements of this rank. Shard with boundary='tensor' for this optimizer, or have it "
            "call mean(), which is of all ranks. Nothing was stepped."
        )


def _emptied(params: Iterable[Any]) -> list[Tensor]:
    """An empty piece of each parameter that no rank has all of."""
    made: list[Tensor] = []
    for param in params:
        piece = piece_of(param)
        if param.requires_grad and piece is not None and not piece.stays_whole:
            values = plain(param)
            empty = nn.Parameter(values.new_empty((0, *values.shape[1:])))
            with without_torch_function():
                grad = torch.zeros_like(values[:0] if values.dim() else empty)
                empty.grad = as_piece(grad, piece)
            be_piece(empty, piece)
            made.append(empty)
    return made
