"""`optimizer.state_dict()` of sharded parameters: every tensor is a shard of the full tensor.

`torch.optim.Optimizer.state_dict` and `load_state_dict` are wrapped for all optimizers at the first
`fully_shard`, and change nothing for other parameters.

- State of its parameter's shape is cut like the parameter, except `step`: it has the shape of a
  0-d parameter.
- Other 0-d state is equal on all ranks that hold elements. If the optimizer skips ranks without
  elements, the first holder's value is saved.
- State with one row per block (scales of 8-bit moments) is cut between blocks.
- Any other tensor depends on the elements of one rank, and is refused unless that rank has all
  elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._errors import StateError
from ..buffers._dtensors import is_dtensor
from ..buffers._views import memory_order
from ._param_piece import ParamPiece, piece_of
from ._piece_tensors import plain
from ._tensors import tensors_in


def is_cut(key: str, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> bool:
    """Whether state is cut like its parameter."""
    return key != "step" and tuple(shape) == tuple(param_shape)


def install_state_hooks() -> None:
    """Wrap torch's methods for saving and loading optimizer state."""
    optimizer: Any = Optimizer
    optimizer.state_dict = _presenting(optimizer.state_dict)
    optimizer.load_state_dict = _taking(optimizer.load_state_dict)


def _presenting(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(original)
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        state = original(optimizer)
        params = list(params_of(optimizer))
        sharded = [param for param in params if piece_of(param) is not None]
        if not sharded:
            return state
        like = next((param for param in sharded if optimizer.state.get(param)), None)
        presented: dict[Any, Any] = {}
        for key, param in zip(_keys_of(state), params, strict=True):
            values, piece = state["state"].get(key), piece_of(param)
            if not values and like is not None and piece is not None and piece.is_stepped:
                values = _empty_state(param, like, optimizer.state[like])
            if values:
                presented[key] = values if piece is None else present_all(values, param, piece)
        return {**state, "state": presented}

    return state_dict


def _empty_state(param: Tensor, like: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """State of a parameter that the optimizer skips on this rank, with the keys of another one's.

    torch's `set_optimizer_state_dict` raises if a parameter has no state.
    """
    piece, found = piece_of(like), dict(values)
    for key, value in values.items():
        if isinstance(value, Tensor) and is_cut(key, tuple(value.shape), tuple(like.shape)):
            found[key] = value.new_empty(param.shape)
        elif isinstance(value, Tensor) and piece is not None and piece.has_rows(key, value):
            found[key] = value.new_empty(0, *value.shape[1:])
    return found


def present_all(
    values: Mapping[str, Any],
    param: Tensor,
    piece: ParamPiece,
    *,
    skips: bool = True,
    name: str = "",
) -> dict[str, Any]:
    """All state of one parameter, as shards.

    `skips`: whether ranks that the optimizer skips have state, too.
    """
    if piece.is_plain:
        return dict(values)
    counted = skips and piece.leaves_ranks_out
    return {
        key: _present(key, value, param, piece, counted, name or piece.name)
        for key, value in values.items()
    }


def _present(
    key: str, value: Any, param: Tensor, piece: ParamPiece, counted: bool, name: str
) -> Any:
    if counted and type(value) in (int, float):
        dtype = torch.int64 if type(value) is int else torch.float64
        return piece.present_number(torch.tensor(value, dtype=dtype))
    if isinstance(value, Tensor):
        if is_cut(key, tuple(value.shape), tuple(param.shape)):
            return piece.present(memory_order(plain(value), param.stride()))
        if not value.dim():
            return piece.present_number(value) if counted else value
        if piece.has_rows(key, value):
            return piece.present_rows(value)
    shapes = [tuple(tensor.shape) for tensor in tensors_in(value) if tensor.dim()]
    held, numel = piece.numel, math.prod(piece.shape)
    if shapes and (counted or held not in (0, numel)):
        raise StateError(
            f"flat_param.state_dict: optimizer state '{key}' of parameter '{name}' has a tensor of "
            f"shape {shapes[0]}, and this rank has {held} of the parameter's {numel} elements, but "
            "only tensors of the parameter's shape, or with a row for each of its blocks, can be "
            'cut. Shard with boundary="tensor", which cuts no parameter, and use '
            "flat_param.save_sharded; or with Blocks as the optimizer has them; or save without it."
        )
    return value


def _taking(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # Runs after all other hooks: a user's hook may change the order of the state.
        hook = optimizer.register_load_state_dict_pre_hook(_take_all)
        try:
            original(optimizer, state_dict)
        finally:
            hook.remove()

    return load_state_dict


def _take_all(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    params, keys = list(params_of(optimizer)), _keys_of(state)
    if len(keys) != len(params) or all(piece_of(param) is None for param in params):
        return state  # torch reports a different number of parameters
    taken = dict(state["state"])
    for key, param in zip(keys, params, strict=True):
        piece = piece_of(param)
        if piece is not None and taken.get(key):
            piece.is_stepped |= piece.skips
            now = vars(optimizer).get("state", {}).get(param, {})
            taken[key] = take_all(taken[key], param, piece, now)
    return {**state, "state": taken}


def take_all(
    values: Mapping[str, Any], param: Tensor, piece: ParamPiece, now: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert one parameter's state from any form of a state dict to the optimizer's form.

    `now` is the current state; it shows which values are numbers.
    """
    return {key: _take(key, value, param, piece, now.get(key)) for key, value in values.items()}


def _take(key: str, value: Any, param: Tensor, piece: ParamPiece, now: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if type(value) is Tensor and piece.is_plain and value.dim():
        return value
    if is_cut(key, tuple(value.shape), piece.shape):
        return piece.elements(value).as_strided(param.shape, param.stride())
    if not value.dim():
        number = getattr(value, "_local_tensor", value).clone().reshape(())
        return type(now)(number.item()) if type(now) in (int, float) else number
    if piece.has_rows(key, value, whole=True):
        return piece.rows_of(value)
    if is_dtensor(value) or piece.numel not in (0, math.prod(piece.shape)):
        raise StateError(
            f"flat_param.load_state_dict: optimizer state '{key}' of parameter {piece.label} has "
            f"shape {tuple(value.shape)}, but the whole parameter has {piece.shape}. Nothing was "
            "loaded. Load the state of the same model: whole tensors, or what state_dict() gives."
        )
    return value


def params_of(optimizer: Optimizer) -> Iterator[Any]:
    """Return the optimizer's parameters, in order."""
    return (param for group in optimizer.param_groups for param in group["params"])


def _keys_of(state: Mapping[str, Any]) -> list[Any]:
    groups: Iterable[Mapping[str, Any]] = state["param_groups"]
    return [key for group in groups for key in group["params"]]
