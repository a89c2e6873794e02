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

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._errors import StateError
from ._param_piece import ParamPiece
from ._piece_tensors import PIECE
from ._tensors import tensors_in


def piece_of(param: Any) -> ParamPiece | None:
    """The piece of a parameter of an optimizer; None if it is not sharded."""
    piece: ParamPiece | None = getattr(param, PIECE, None)
    return piece


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
        if all(piece_of(param) is None for param in params):
            return state
        keys = _keys_of(state)
        filled = _state_of_skipped(optimizer, params)
        presented: dict[Any, Any] = {}
        for key, param in zip(keys, params, strict=True):
            values, piece = state["state"].get(key), piece_of(param)
            if not values:
                values = filled(param)
            if values is not None:
                presented[key] = values if piece is None else present_all(values, param, piece)
        return {**state, "state": presented}

    return state_dict


def _state_of_skipped(
    optimizer: Optimizer, params: list[Any]
) -> Callable[[Any], dict[str, Any] | None]:
    """A function that returns empty state for a parameter that the optimizer skips on this rank.

    torch's `set_optimizer_state_dict` raises if a parameter has no state. The keys are those of
    another parameter.
    """
    state: Mapping[Any, dict[str, Any]] = optimizer.state
    like = next((p for p in params if state.get(p) and piece_of(p) is not None), None)

    def fill(param: Any) -> dict[str, Any] | None:
        piece, other = piece_of(param), None if like is None else piece_of(like)
        if piece is None or other is None or not piece.is_stepped or param.numel():
            return None
        values = state[like].items()
        return {key: _empty(key, value, param, like, other) for key, value in values}

    return fill


def _empty(key: str, value: Any, param: Any, like: Any, like_piece: ParamPiece) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    if is_cut(key, tuple(value.shape), tuple(like.shape)):
        return value.new_empty(param.shape)
    if like_piece.rows is not None and like_piece.rows.fits_piece(key, value):
        return value.new_empty(0, *value.shape[1:])
    return value.clone()


def present_all(
    values: Mapping[str, Any],
    param: Tensor,
    piece: ParamPiece,
    *,
    skips: bool = True,
    name: str = "",
) -> dict[str, Any]:
    """All state of one parameter, as shards."""
    for key, value in values.items():
        if reason := no_place(key, value, tuple(param.shape), piece, name):
            raise StateError(reason)
    return {key: _present(key, value, param, piece, skips) for key, value in values.items()}


def _present(key: str, value: Any, param: Tensor, piece: ParamPiece, skips: bool) -> Any:
    from ._flat_shard import flat_view

    if piece.is_plain:
        return value
    numbered = skips and piece.leaves_ranks_out
    if type(value) in (int, float) and numbered:
        return piece.present_number(torch.tensor(value, dtype=_number_dtype(value)))
    if not isinstance(value, Tensor):
        return value
    if is_cut(key, tuple(value.shape), tuple(param.shape)):
        return piece.present(flat_view(value, param))
    if not value.dim():
        return piece.present_number(value) if numbered else value
    rows = piece.rows
    if rows is not None and rows.fits_piece(key, value):
        return piece.present_rows(value)
    if not param.numel() and not value.numel() and piece.is_cut:
        return piece.present_rows(value)
    return value


def _number_dtype(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


def no_place(
    key: str, value: Any, shape: tuple[int, ...], piece: ParamPiece, name: str = ""
) -> str:
    """Return the error message if a state value is not a shard of a full tensor, else ""."""
    if isinstance(value, Tensor) and is_cut(key, tuple(value.shape), shape):
        return ""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(value) if tensor.dim()]
    held, numel = piece.shard.numel, piece.whole_numel
    if not shapes or held in (0, numel):
        return ""
    rows = piece.rows
    if rows is not None and (rows.fits_piece(key, value) or rows.fits_whole(key, value)):
        return ""
    return (
        f"flat_param.state_dict: optimizer state '{key}' of parameter '{name or piece.name}' has a "
        f"tensor of shape {shapes[0]}, and this rank has {held} of the parameter's {numel} "
        "elements, but only tensors of the parameter's shape, or with a row for each of its "
        'blocks, can be cut. Shard with boundary="tensor", which cuts no parameter, or with Blocks '
        "as the optimizer has them; or save without it."
    )


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
    extent = getattr(value, "_extent", None)
    if extent is not None and not extent.size:  # a number, or state of a 0-d parameter
        if is_cut(key, (), piece.shape):
            return piece.elements(value).as_strided(param.shape, param.stride())
        number = value._local_tensor.clone().reshape(())  # type: ignore[attr-defined]  # FlatShard's
        return type(now)(number.item()) if type(now) in (int, float) else number
    if is_cut(key, tuple(value.shape), piece.shape):
        return piece.elements(value).as_strided(param.shape, param.stride())
    if extent is not None:
        rows = value._local_tensor  # type: ignore[attr-defined]  # FlatShard's
        mine = _own_rows(piece, extent)
        if mine is None or mine != (extent.start, extent.stop):
            raise _other_rows(key, piece, str(extent))
        return rows.view(-1, *extent.shape[1:])
    if not value.dim():
        return type(now)(value.item()) if type(now) in (int, float) else value.clone()
    rows_here = piece.rows
    if rows_here is not None and rows_here.fits_whole(key, value):
        return rows_here.of(value).clone()
    if piece.shard.numel not in (0, piece.whole_numel):
        raise StateError(
            f"flat_param.load_state_dict: optimizer state '{key}' of parameter '{piece.name}' has "
            f"shape {tuple(value.shape)}, but the whole parameter has {piece.shape}. Nothing was "
            "loaded. Load the state of the same model: whole tensors, or what state_dict() gives."
        )
    return value


def _own_rows(piece: ParamPiece, extent: Any) -> tuple[int, int] | None:
    rows = piece.rows
    if rows is None:
        return (0, 0) if not piece.shard.numel else None
    each = 1
    for size in extent.shape[1:]:
        each *= size
    if extent.shape[0] != rows.total:
        return None
    return rows.first * each, (rows.first + rows.count) * each


def _other_rows(key: str, piece: ParamPiece, held: str) -> StateError:
    return StateError(
        f"flat_param.load_state_dict: optimizer state '{key}' of parameter '{piece.name}' has "
        f"{held}, but this rank has other blocks. It was saved by another rank, or sharded in "
        "another way. Save with torch.distributed.checkpoint or flat_param.save_sharded."
    )


def params_of(optimizer: Optimizer) -> Iterator[Any]:
    """Return the optimizer's parameters, in order."""
    return (param for group in optimizer.param_groups for param in group["params"])


def _keys_of(state: Mapping[str, Any]) -> list[Any]:
    groups: Iterable[Mapping[str, Any]] = state["param_groups"]
    return [key for group in groups for key in group["params"]]
