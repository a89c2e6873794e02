"""Try an optimizer on empty pieces before its first step.

An optimizer that needs whole tensors is refused where it reads a piece, see _piece_tensors.py. At
that point it may have updated other parameters, and a rank without elements of that piece never
reads it. A copy of the optimizer is therefore stepped once on an empty piece of each parameter that
is cut: the refusal comes on all ranks, before anything has changed.

Not tried: torch's own elementwise optimizers, which are never refused; optimizers whose options or
attributes are no plain values; a copy that fails in another way, such as without a closure.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import ParameterError
from .._torch_compat import unhooked_step, without_torch_function
from ..buffers._loaded_state import ELEMENTWISE
from ..layout._param_shard import stays_whole
from ._optim_state import piece_of
from ._param_piece import ParamPiece
from ._piece_tensors import as_piece, be_piece, plain

_tried: WeakSet[Optimizer] = WeakSet()
_PLAIN = (bool, int, float, complex, str, type(None))


def try_first_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise the error that the step would raise on pieces; a hook before each step."""
    kind = type(optimizer)
    is_known = kind in ELEMENTWISE or hasattr(optimizer, "steps_bucket")
    if optimizer in _tried or is_known or torch.compiler.is_compiling():
        return
    _tried.add(optimizer)
    groups = [_emptied(group) for group in optimizer.param_groups]
    own = {key: value for key, value in vars(optimizer).items() if key not in _REPLACED}
    hooks: dict[str, Any] = {key: OrderedDict() for key in own if key.startswith("_optimizer_")}
    options = [value for group in groups for key, value in group.items() if key != "params"]
    beside = [value for key, value in own.items() if key not in hooks]
    if not any(group["params"] for group in groups) or not all(map(_is_plain, options + beside)):
        return
    twin = object.__new__(kind)
    vars(twin).update({**own, **hooks}, param_groups=groups, state=defaultdict(dict))
    # Its steps are not counted.
    vars(twin).update(defaults=optimizer.defaults, steps_bucket=True)
    try:
        unhooked_step(kind)(twin)
    except ParameterError:
        raise
    except Exception:
        return


_REPLACED = ("state", "param_groups", "defaults", "step")  # a scheduler wraps `step`


def _emptied(group: dict[str, Any]) -> dict[str, Any]:
    pieces = ((param, piece_of(param)) for param in group["params"] if param.requires_grad)
    params = [
        _empty(param, piece)
        for param, piece in pieces
        if piece is not None and piece.is_cut and not stays_whole(piece.plan, piece.index)
    ]
    return {**copy.copy(group), "params": params}


def _empty(param: nn.Parameter, piece: ParamPiece) -> nn.Parameter:
    values = plain(param)
    made = nn.Parameter(values.new_empty((0, *values.shape[1:])))
    with without_torch_function():
        made.grad = as_piece(torch.zeros_like(values[:0] if values.dim() else made), piece)
    be_piece(made, piece)
    return made


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) and not isinstance(value, Tensor)
