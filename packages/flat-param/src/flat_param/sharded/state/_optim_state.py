"""`optimizer.state_dict()` of sharded parameters: every tensor is a shard of the full tensor.

State that an optimizer makes with `zeros_like` is a piece. Hooks of the optimizer put shards into a
state dict, and take them and whole tensors from one. They are registered when the optimizer takes a
sharded parameter, or at its first step if parameters were sharded later. State that was loaded or
made before is cut there.

- A piece is cut like its parameter, and so is a plain tensor of the parameter's shape, except
  `step`: it has the shape of a 0-d parameter.
- Other 0-d state is equal on all ranks that hold elements. If the optimizer skips ranks without
  elements, the first holder's value is saved.
- State with one row per block (scales of 8-bit moments) is cut between blocks.
- Any other tensor depends on the elements of one rank, and is refused unless that rank has all
  elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..._errors import StateError
from ..._torch_compat import without_torch_function
from ...buffers._dtensors import is_dtensor
from ...buffers._views import memory_order
from ..tensor._callers import SAVERS
from ..tensor._nested import tensors_in
from ..tensor._param_piece import ParamPiece, piece_of
from ..tensor._piece_tensors import Piece, as_piece, plain

_SAVE_STATE = (
    "Call flat_param.save_sharded on every rank, and load_sharded to resume, or use accelerate's "
    "FullyShardedDataParallelPlugin with fsdp_version=2, which saves all shards"
)
_SAVE_PRETRAINED = (
    "Call full = flat_param.full_state_dict(model, rank0_only=True)['model'] on every rank, and on "
    "the first one save_pretrained(path, state_dict=full)"
)


def is_cut(key: str, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> bool:
    """Whether state is cut like its parameter."""
    return key != "step" and tuple(shape) == tuple(param_shape)


_settled: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
"""The state of each optimizer that was last looked at; loading makes another one."""


def follow(optimizer: Any) -> None:
    """Have the state dicts of an optimizer with sharded parameters present and take shards."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        return  # it wraps another optimizer, as accelerate's does, which is followed
    if optimizer in _settled:
        return
    _settled[optimizer] = None
    optimizer.register_state_dict_post_hook(_present_state)
    optimizer.register_load_state_dict_pre_hook(_take_state)
    optimizer.register_load_state_dict_post_hook(_mark_settled)


def settle(optimizer: Optimizer) -> None:
    """Cut state that was loaded, before hooks could, or made before sharding."""
    state = vars(optimizer).get("state")
    if optimizer not in _settled or _settled[optimizer] is state or state is None:
        return
    for param in params_of(optimizer):
        piece, values = piece_of(param), state.get(param)
        if piece is not None and values:
            piece.is_stepped |= piece.skips
            state[param] = take_all(values, param, piece, values)
    _settled[optimizer] = state


def _mark_settled(optimizer: Optimizer) -> None:
    _settled[optimizer] = vars(optimizer)["state"]


def _present_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    params = params_of(optimizer)
    sharded = [param for param in params if piece_of(param) is not None]
    if not sharded:
        return state
    pieces = list(map(piece_of, sharded))
    if any(piece.is_cut for piece in pieces if piece is not None):
        refuse_one_rank()
    like = next((param for param in sharded if optimizer.state.get(param)), None)
    presented: dict[Any, Any] = {}
    for key, param in zip(_keys_of(state), params, strict=True):
        values, piece = state["state"].get(key), piece_of(param)
        if not values and like is not None and piece is not None and piece.is_stepped:
            values = _empty_state(param, like, optimizer.state[like])
        if values:
            presented[key] = values if piece is None else present_all(values, param, piece)
    return {**state, "state": presented}


def refuse_one_rank() -> None:
    """Refuse a state dict of shards to a function that would write those of one rank."""
    saver = SAVERS.frame()
    if saver is None:
        return
    name = saver.f_code.co_name
    if name == "get_state_dict":
        instead = "Call flat_param.full_state_dict on every rank"
    else:
        instead = _SAVE_PRETRAINED if name == "save_pretrained" else _SAVE_STATE
    raise StateError(
        f"flat_param.state_dict: {name}() of another library would write the shards of one rank. "
        f"{instead}."
    )


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
    with without_torch_function():
        return _present_each(values, param, piece, counted, name or piece.name)


def _present_each(
    values: Mapping[str, Any], param: Tensor, piece: ParamPiece, counted: bool, name: str
) -> dict[str, Any]:
    return {key: _present(key, value, param, piece, counted, name) for key, value in values.items()}


def _present(
    key: str, value: Any, param: Tensor, piece: ParamPiece, counted: bool, name: str
) -> Any:
    if counted and type(value) in (int, float):
        dtype = torch.int64 if type(value) is int else torch.float64
        return piece.present_number(torch.tensor(value, dtype=dtype))
    if isinstance(value, Piece):
        if piece_of(value) is piece and value.shape == param.shape:
            local = (value.detach() if value.requires_grad else value).as_subclass(Tensor)
            return piece.present(memory_order(local, local.stride()))
        value = plain(value)  # in another shape, such as a row for each block
    if is_dtensor(value):
        return value  # loaded, and not stepped since
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


def _take_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    params, keys = params_of(optimizer), _keys_of(state)
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
    if piece_of(value) is not None:
        return value
    if type(value) is Tensor and piece.is_plain and value.dim():
        return value
    if is_cut(key, tuple(value.shape), piece.shape):
        return as_piece(piece.elements(value).as_strided(param.shape, param.stride()), piece)
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


def params_of(optimizer: Optimizer) -> list[Any]:
    """The optimizer's parameters, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _keys_of(state: Mapping[str, Any]) -> list[Any]:
    groups: Iterable[Mapping[str, Any]] = state["param_groups"]
    return [key for group in groups for key in group["params"]]
