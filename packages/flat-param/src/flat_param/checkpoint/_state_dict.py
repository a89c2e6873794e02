"""Full state dicts of a sharded module and its optimizer, with the plain module's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import StateError
from .._torch_compat import without_torch_function
from ..buffers._dtensors import as_dtensor, is_dtensor
from ..layout._arguments import check_is_module
from ..sharded.tensor._nested import map_tensors
from ..sharded.tensor._param_piece import ParamPiece, piece_of
from ..sharded.unit._by_hand import units_at_rest
from ._optim_state import (
    NamedParam,
    load_optimizer_state,
    named_optimizer_state,
    optimizer_params,
)
from ._world import World

EXTRA = "_extra_state"  # the last word of torch's keys for `get_extra_state()`


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
        rank0_only: only the first rank keeps it. Others have one full tensor at a time, and get
            empty dicts.
        offload_to_cpu: move each tensor to CPU memory as soon as it is complete.

    Returns:
        `model`, and with an optimizer `optim`: `state` and `param_groups` by parameter name, as
        torch's `get_optimizer_state_dict` returns them.

    Raises:
        CheckpointError: another rank has failed.
        StateError: optimizer state cannot be cut.
    """
    check_is_module("full_state_dict", module)
    world = World(module, "full_state_dict", plain=True)
    state: dict[str, Any] = {}
    with world.agreed():
        state["model"] = module.state_dict()
        if optimizer is not None:
            state["optim"] = named_optimizer_state(module, optimizer)
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
        name: {
            key: _Shard(value.dtype, tuple(value.shape)) if is_dtensor(value) else value
            for key, value in values.items()
            if is_dtensor(value) or named[name].speaks
        }
        for name, values in state.items()
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in named}
    for told in world.comm.share(note):
        for name, values in told.items():
            for key, value in values.items():
                first = found[name].setdefault(key, value)
                if isinstance(value, _Shard) and first != value:
                    raise StateError(
                        f"flat_param.full_state_dict: optimizer state '{key}' of parameter "
                        f"'{name}' has shape {first.size} and {first.dtype} on one rank and "
                        f"{value.size} and {value.dtype} on another. Step the same optimizer on "
                        "all ranks."
                    )
            if len(values) == len(found[name]):  # a rank that has all of them gives their order
                found[name] = {key: found[name][key] for key in values}
    return {
        name: {
            key: state[name][key] if key in state.get(name, ()) else _empty(value, named[name])
            for key, value in values.items()
        }
        for name, values in found.items()
        if values
    }


class _Shard(NamedTuple):
    """Dtype and whole size of a shard, for ranks without elements of it."""

    dtype: torch.dtype
    size: tuple[int, ...]


def _empty(value: Any, named: NamedParam) -> Any:
    """The shard of a rank without elements; other values unchanged."""
    piece = named.piece
    if piece is None or not isinstance(value, _Shard):
        return value
    if value.size == piece.shape:
        return piece.present(torch.empty(0, dtype=value.dtype, device=piece.device))
    rows = torch.empty(0, *value.size[1:], dtype=value.dtype, device=piece.device)
    return piece.present_rows(rows)


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
        optimizer: of the module; needs `state["optim"]`, by parameter name. Its groups may be in
            another order than the saved ones.

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
    with restored_on_error(module, optimizer), world.agreed():
        load_named(module, _from_first(state, module, world), optimizer)


def _from_first(state: Mapping[str, Any], module: nn.Module, world: World) -> Mapping[str, Any]:
    """Return the state, or this rank's part if only the first rank has it. Collective."""
    is_empty = world.comm.share(not any(len(part) for part in state.values()))
    if is_empty[0] or not any(is_empty):
        return state
    pieces = pieces_of(module)
    # Ranks take tensors in the same order: the first from its state, others from an outline.
    outline = map_tensors(dict(state), lambda t: t.to("meta")) if world.is_first else None
    outline = world.comm.share(outline)[0]

    def sent(name: str, tensor: Tensor) -> Any:
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        if world.is_first:
            found.copy_(tensor.detach())
        if found.numel():
            world.comm.broadcast(found.view(-1).view(torch.uint8)).wait()
        return cut(found, pieces.get(name))

    def sent_all(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: map_tensors(v, partial(sent, k)) for k, v in values.items()}

    source = state if world.is_first else outline
    found = {"model": sent_all(source["model"])}
    if source.get("optim"):
        found["optim"] = {**source["optim"], "state": sent_all(source["optim"]["state"])}
    return found


@contextmanager
def restored_on_error(module: nn.Module, optimizer: Optimizer | None) -> Iterator[dict[str, Any]]:
    """Restore parameters, buffers and optimizer state if the block raises. Not a collective.

    Gives the module's state dict. Optimizer state is not copied, since `load_state_dict` replaces
    it by new tensors.
    """
    units = units_at_rest(module)  # refuses copies that whole_params shows
    pieces = [p for unit in units for part in unit.parts for p in part.params]
    with without_torch_function():
        held = [piece.detach().to("cpu", copy=True) for piece in pieces]
    in_units = pieces_of(module)
    own = module.state_dict()
    beside = {name: value for name, value in own.items() if in_units.get(name) is None}
    before = map_tensors(beside, partial(copied, device="cpu"))
    has_groups = hasattr(optimizer, "param_groups")  # otherwise the block raises
    kept = (optimizer.state, optimizer.param_groups) if optimizer and has_groups else None
    try:
        yield own
    except BaseException:
        if optimizer is not None and kept is not None:
            optimizer.state, optimizer.param_groups = kept
        with torch.no_grad(), without_torch_function():
            for piece, value in zip(pieces, held, strict=True):
                piece.copy_(value)
        module.load_state_dict(before, strict=False)
        raise


def copied(tensor: Tensor, *, device: Any) -> Tensor:
    """A copy on a device, of shards too."""
    moved = tensor.detach().to(device)
    return moved.clone() if tensor.device == moved.device else moved


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
    tied: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        tied.setdefault(param, []).append(name)
    for names in tied.values():
        given = [known[name] for name in names if name in known]
        known |= {name: given[0] for name in names if given and name not in known}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_dtensor(tensor) and name in known:
            known[name] = as_dtensor(known[name], tensor)
    try:
        module.load_state_dict(known)
    except RuntimeError as error:
        raise StateError(f"flat_param.load_state_dict: {error}") from error
    if optimizer is not None:
        load_optimizer_state(module, optimizer, state["optim"])


def pieces_of(module: nn.Module) -> dict[str, ParamPiece | None]:
    """The piece of each parameter, under all of its names; None if it is not sharded."""
    return {n: piece_of(p) for n, p in module.named_parameters(remove_duplicate=False)}


def cut(whole: Any, piece: ParamPiece | None) -> Any:
    """This rank's part of a whole tensor as a shard; other values unchanged."""
    if piece is None or not isinstance(whole, Tensor) or not piece.is_cut or not whole.dim():
        return whole
    if tuple(whole.shape) != piece.shape:
        return whole
    return piece.present(piece.elements(whole))


def is_extra(key: str) -> bool:
    """Whether a key of a state dict is for a module's `get_extra_state()`."""
    return key.rpartition(".")[2] == EXTRA
