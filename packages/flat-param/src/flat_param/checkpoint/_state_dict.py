"""Full state dicts of a sharded module and its optimizer, with the plain module's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import StateError
from ..buffers._dtensors import as_dtensor, is_dtensor
from ..layout._arguments import check_is_module
from ..sharded._full_params import named_sites
from ..sharded._param_piece import ParamPiece
from ._optim_state import (
    load_optimizer_state,
    named_optimizer_state,
    optimizer_params,
    pieces_of,
)
from ._put_back import put_back_on_error
from ._world import World


def full_state_dict(
    module: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> dict[str, Any]:
    """Return full tensors under the plain module's keys, on every rank. Collective.

    Args:
        module: sharded, or plain.
        optimizer: of the module.
        rank0_only: keep it only on the first rank that shares the module. The other ranks have one
            full tensor at a time, and get empty dicts.
        offload_to_cpu: move each tensor to CPU memory as soon as it is complete.

    Returns:
        `{"model": {name: tensor}}`, and with an optimizer
        `"optim": {"state": {name: {key: value}}, "param_groups": [...]}`.

    Raises:
        StateError: optimizer state cannot be cut.
    """
    check_is_module("full_state_dict", module)
    world = World(module, "full_state_dict", plain=True)
    error: Exception | None = None
    state: dict[str, Any] = {}
    try:
        state["model"] = module.state_dict()
        if optimizer is not None:
            state["optim"] = named_optimizer_state(module, optimizer)
    except Exception as raised:
        error = raised
    world.agree(error)
    keeps = world.is_first or not rank0_only
    whole = partial(_whole, keeps=keeps, on_host=offload_to_cpu)
    state["model"] = {name: whole(value) for name, value in state["model"].items()}
    if optimizer is not None:
        state["optim"]["state"] = {
            name: {key: whole(value) for key, value in values.items()}
            for name, values in _complete(state["optim"]["state"], module, optimizer, world).items()
        }
    return state if keeps else {part: {} for part in state}


def _complete(
    state: dict[str, dict[str, Any]], module: nn.Module, optimizer: Optimizer, world: World
) -> dict[str, dict[str, Any]]:
    """Add empty shards and values of other ranks, so all gather the same tensors. Collective."""
    named = {each.name: each for group in optimizer_params(module, optimizer) for each in group}
    note = {
        name: {key: _described(value, named[name].speaks) for key, value in values.items()}
        for name, values in state.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for told in world.comm.share(note):
        for name, values in told.items():
            for key, value in values.items():
                known = found.setdefault(name, {})
                first = known.setdefault(key, value)  # keeps the order of keys
                if first is None:
                    first = known[key] = value
                if isinstance(value, _Shard) and first != value:
                    raise StateError(
                        f"flat_param.full_state_dict: optimizer state '{key}' of parameter "
                        f"'{name}' has shape {first.size} and {first.dtype} on one rank and "
                        f"{value.size} and {value.dtype} on another. Step the same optimizer on "
                        "all ranks."
                    )

    def filled(name: str, key: str, value: Any) -> Any:
        piece = named[name].piece
        if key in state.get(name, {}):
            return state[name][key]
        return value.empty(piece) if isinstance(value, _Shard) and piece is not None else value

    return {
        name: {key: filled(name, key, value) for key, value in found[name].items()}
        for name in named
        if name in found
    }


@dataclass(frozen=True)
class _Shard:
    """Dtype and whole size of a shard, for ranks without elements of it."""

    dtype: torch.dtype
    size: tuple[int, ...]

    def empty(self, piece: Any) -> Tensor:
        """Return the shard of a rank that has no elements."""
        if self.size == piece.shape:
            shard: Tensor = piece.present(torch.empty(0, dtype=self.dtype, device=piece.device))
            return shard
        rows = torch.empty(0, *self.size[1:], dtype=self.dtype, device=piece.device)
        return piece.present_rows(rows)


def _described(value: Any, speaks: bool) -> Any:
    """A shard, or a value on the rank that provides it; None on other ranks."""
    if is_dtensor(value):
        return _Shard(value.dtype, tuple(value.shape))
    return value if speaks else None


def _whole(value: Any, *, keeps: bool, on_host: bool) -> Any:
    """Gather a value; None on ranks that do not keep it. Collective for shards."""
    if is_dtensor(value):
        value = value.full_tensor()
    if not keeps:
        return None
    return value.cpu() if on_host and isinstance(value, Tensor) else value


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, optimizer: Optimizer | None = None
) -> None:
    """Load full tensors; each rank keeps its part. Collective if the module is sharded.

    After an error on any rank, all have their previous parameters, buffers and optimizer state.
    Needs memory for one more copy of them.

    Args:
        module: sharded, or plain.
        state: result of `full_state_dict`, or a plain module's state dict. With `rank0_only` the
            first rank sends one tensor after another to the others.
        optimizer: of the module; needs `state["optim"]`, by name or by position. Its groups may be
            in another order than the saved ones, if names were saved.

    Raises:
        CheckpointError: another rank has failed.
        StateError: a shape, a name or a parameter group does not fit.
    """
    check_is_module("load_full_state_dict", module)
    if not isinstance(state, Mapping):
        raise StateError(
            f"flat_param.load_full_state_dict: state is a {type(state).__name__}, but it must be a "
            "state dict. Pass what full_state_dict returned, or use load_sharded for a path."
        )
    world = World(module, "load_full_state_dict", plain=True)
    if not isinstance(state.get("model"), Mapping):
        state = {"model": state}
    with put_back_on_error(module, optimizer):
        error: Exception | None = None
        try:
            load_named(module, _from_first(state, module, world), optimizer)
        except Exception as raised:
            error = raised
        world.agree(error)


def load_named(module: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None) -> None:
    """Load `model` and `optim` of a state by name, shards or whole tensors. Not a collective.

    A tied parameter may have one of its names.
    """
    if optimizer is not None and "optim" not in state:
        raise StateError(
            "flat_param.load_full_state_dict: the state has no 'optim' next to 'model', from "
            "which an optimizer is loaded. Leave the optimizer out."
        )
    known = dict(state["model"])
    for names in tied_names(module):
        given = next((name for name in names if name in known), None)
        for name in names:
            if given is not None:
                known.setdefault(name, known[given])
    beside = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in beside.items():
        if is_dtensor(tensor) and name in known:
            known[name] = as_dtensor(known[name], tensor)
    try:
        module.load_state_dict(known)
    except RuntimeError as error:
        raise StateError(f"flat_param.load_state_dict: {error}") from error
    if optimizer is not None:
        load_optimizer_state(module, optimizer, state["optim"])


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter."""
    names: dict[object, list[str]] = {}
    for name, site in named_sites(module):
        names.setdefault((id(site.part), site.index), []).append(name)
    managed = {name for own in names.values() for name in own}
    for name, param in module.named_parameters(remove_duplicate=False):
        if name not in managed:
            names.setdefault(id(param), []).append(name)
    return [own for own in names.values() if len(own) > 1]


def _from_first(state: Mapping[str, Any], module: nn.Module, world: World) -> Mapping[str, Any]:
    """Return the state, or this rank's part if only the first rank has it. Collective."""
    is_empty = world.comm.share(not any(len(part) for part in state.values()))
    if is_empty[0] or not any(is_empty):
        return state
    error: Exception | None = None
    outline: dict[str, Any] = {}
    try:
        outline = _outline(state) if world.is_first else {}
    except Exception as raised:
        error = StateError(
            f"flat_param.load_full_state_dict: the first rank's state cannot be sent ({raised!r}). "
            "Pass what full_state_dict returns."
        )
    world.agree(error)
    outline = world.comm.share(outline)[0]
    pieces = pieces_of(module)
    sources = _slots(state if world.is_first else outline)
    for (values, key, name), (source, _, _) in zip(_slots(outline), sources, strict=True):
        values[key] = cut(_sent(source[key], values[key], world), pieces.get(name))
    return outline


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with each tensor replaced by a description."""
    outline: dict[str, Any] = {"model": _described_all(state["model"])}
    if "optim" in state:
        values = {name: _described_all(own) for name, own in state["optim"]["state"].items()}
        outline["optim"] = {"state": values, "param_groups": state["optim"]["param_groups"]}
    return outline


def _described_all(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _Shard(value.dtype, tuple(value.shape))
        if isinstance(value, Tensor) and value.dim()
        else value
        for key, value in values.items()
    }


def _slots(state: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield for each value of a state its dict, its key and its parameter's name."""
    for name in state["model"]:
        yield state["model"], name, name
    for name, values in state.get("optim", {}).get("state", {}).items():
        for key in values:
            yield values, key, name


def _sent(value: Any, info: Any, world: World) -> Any:
    """Return the first rank's value. Collective if it is a tensor."""
    if not isinstance(info, _Shard):
        return info
    if world.is_first:
        sent = value.detach().cpu().contiguous()
    else:
        sent = torch.empty(info.size, dtype=info.dtype)
    if sent.numel():
        world.comm.broadcast(sent.view(-1).view(torch.uint8)).wait()
    return sent


def cut(whole: Any, piece: ParamPiece | None) -> Any:
    """This rank's part of a whole tensor as a shard; other values unchanged."""
    if piece is None or not isinstance(whole, Tensor) or not piece.is_cut or not whole.dim():
        return whole
    if tuple(whole.shape) != piece.shape:
        return whole
    return piece.present(piece.elements(whole))


def optimizer_state_by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the optimizer part of a full state dict to positions, for torch's `load_state_dict`.

    Raises:
        StateError: it is not the state of an optimizer.

    Example:
        >>> named = {"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
        >>> optimizer_state_by_position(named)["state"]
        {0: {'step': 1}}
    """
    if "param_groups" not in state:
        raise StateError(
            f"flat_param.optimizer_state_by_position: state has the keys {sorted(state)[:3]}, but "
            "it must be an optimizer's. Pass full_state_dict(module, optimizer=...)['optim']."
        )
    names = [name for group in state["param_groups"] for name in group["params"]]
    position = {name: index for index, name in enumerate(names)}
    return {
        "state": {position[name]: value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [position[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }
