"""Loads a checkpoint of any world size into a sharded module; each rank reads its part.

Note [All or none]
    Each rank loads its part, then tells the others how that went and which metadata it has read.
    Where one has failed, all put back what they had and raise. Where a save replaced the
    checkpoint meanwhile, so that files are gone or two ranks read two states, all load again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import CheckpointError, FlatParamError, StateError
from ..comm._comm import CommLog, Communicator
from ..dcp._checkpoint import guess_ahead
from ..dcp._dcp_metadata import digest_of, parse_metadata, read_bytes
from ..dcp._dcp_read import read_folder
from ..dcp._read_ahead import ReadAhead
from ..dcp._saved_keys import GROUPS, MODEL, STATE, nested_path
from ..dcp._stored import Place, Stored, StoredTensor
from ..dcp._tensor_slice import TensorSlice, whole
from ..memory._dtensors import local_of, place_of_dtensor
from ..memory._huge_pages import prefer_huge_pages
from ..sharded._by_hand import units_below
from ..sharded._full_params import local_state, named_sites
from ..sharded._param_sites import ParamSite
from ._meeting import share_over
from ._one_world import OneWorld, one_world, slice_beside, slice_of
from ._optim_state import (
    NamedParam,
    is_cut,
    load_pieces,
    no_place,
    optimizer_params,
    options_by_name,
)
from ._put_back import Kept, is_extra, owner_of_extra, put_back_on_error
from ._state_dict import load_full_state_dict

_TRIES = 10


def load_sharded(
    module: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load a checkpoint of any world size; each rank reads its part. Collective.

    Every checksum is compared. All ranks load, or none: after an error on any of them, each has
    the parameters, buffers and optimizer state it had. Takes memory for one more copy of this
    rank's parameters.

    Args:
        module: sharded.
        path: a folder in torch.distributed.checkpoint's format (ours or FSDP2's), or a file with
            a plain state dict (FSDP1's full one too) that `torch.save` wrote.
        optimizer: of the module; its groups may be in another order than when it was saved.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, of another model, tries to run
            code, or is being replaced again and again; or another rank cannot load it.
        StateError: the module is not sharded, or not in one way; or the optimizer's groups do not
            fit the saved ones.
        ParameterError: the optimizer has a parameter that the module does not have.
    """
    source, world = Path(path), one_world(module, function="load_sharded")
    comms = [_uncounted(comm) for comm in world.axes]
    with put_back_on_error(module, optimizer, later=True) as kept:
        for tries in range(_TRIES):
            if tries:
                time.sleep(0.01 * tries)
            mine, error = _attempt(module, source, optimizer, kept, world)
            told = share_over(comms, mine)
            if all(each == told[0] and not each.error for each in told):
                return
            if not _replaced(told):
                raise error or _from_another(told)
        raise CheckpointError(
            f"flat_param.load_sharded: '{source}' was replaced {_TRIES} times while it was read, "
            "but all ranks must read one checkpoint. A save is under way: load again when it is "
            "over."
        )


@dataclass(frozen=True)
class _LoadResult:
    """How loading went on one rank.

    Attributes:
        read: digest of the metadata that was read; empty where there is none to read.
        now: the same after an error.
        rank: where the error is; -1 without one.
        error: its text; empty without one.
    """

    read: str
    now: str
    rank: int = -1
    error: str = ""


def _attempt(
    module: nn.Module, source: Path, optimizer: Optimizer | None, kept: Kept, world: OneWorld
) -> tuple[_LoadResult, Exception | None]:
    read = "file" if source.is_file() else ""
    try:
        if read:
            state = _read_file(source)
            kept.add_all()
            load_full_state_dict(module, state, optimizer=optimizer)
            return _LoadResult(read, read), None
        with closing(ReadAhead()) as ahead:
            guess_ahead(ahead, source, world.part, world.parts)
            data = read_bytes(source)
            read = digest_of(data)
            stored = parse_metadata(source, data)
            _load_model(module, source, stored, kept, ahead)
            if optimizer is not None:
                _load_optimizer(module, optimizer, source, stored, ahead)
    except Exception as error:
        known = error if isinstance(error, FlatParamError) else _unfit(source, error)
        return _LoadResult(read, _mark(source), dist.get_rank(), str(known)), known
    return _LoadResult(read, read), None


def _mark(source: Path) -> str:
    if source.is_file():
        return "file"
    try:
        return digest_of(read_bytes(source))
    except CheckpointError:
        return ""


def _replaced(told: list[_LoadResult]) -> bool:
    return len({each.read for each in told}) > 1 or any(each.now != each.read for each in told)


def _from_another(told: list[_LoadResult]) -> CheckpointError:
    other = next(each for each in told if each.error)
    return CheckpointError(
        f"flat_param.load_sharded: rank {other.rank} cannot load the checkpoint, but all ranks "
        f"must. Nothing was loaded on any. Correct the error of that rank: {other.error}"
    )


def _uncounted(comm: Communicator) -> Communicator:
    return Communicator(comm.group, log=CommLog())


def _unfit(source: Path, error: Exception) -> CheckpointError:
    raised = CheckpointError(
        f"flat_param.load_sharded: '{source}' cannot be loaded ({type(error).__name__}: "
        f"{str(error)[:500]}), but it must fit the module and its optimizer. It is damaged, or of "
        "another model: load another one."
    )
    raised.__cause__ = error
    return raised


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"flat_param.load_sharded: file '{path}' cannot be read ({_first_line(error)}), but it "
            "must hold tensors only. It is truncated, foreign or hostile: load another one."
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"flat_param.load_sharded: file '{path}' holds a {type(state).__name__}, but a state "
            "dict is expected. Save module.state_dict()."
        )
    return state


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _load_model(
    module: nn.Module, folder: Path, stored: Stored, kept: Kept, ahead: ReadAhead
) -> None:
    # A bare state dict has no prefix.
    prefix = MODEL if any(key.startswith(MODEL) for key in stored.entries) else ""
    tensor_slices = []
    for names, site in _first_names(module):
        name = next((n for n in names if prefix + n in stored.entries), names[0])
        piece = site.part.pieces[site.index]
        tensor_slices.append(slice_of(prefix + name, site, piece.flat(site.part.shard)))
    rest = local_state(module)
    copies = {
        key: local_of(value).clone(memory_format=torch.contiguous_format)
        for key, value in rest.items()
        if isinstance(value, Tensor)
    }
    tensor_slices += [
        slice_beside(prefix + key, copy, place_of_dtensor(rest[key]))
        for key, copy in copies.items()
    ]
    others = [
        k for k in rest if k not in copies and isinstance(stored.entries.get(prefix + k), Place)
    ]
    wanted = [prefix + key for key in others]
    values = read_folder(folder, stored, tensor_slices, keys=wanted, keep=kept.add, ahead=ahead)
    for key in [*copies, *others]:
        loaded = copies[key] if key in copies else values[prefix + key]
        if is_extra(key):
            owner_of_extra(module, key).set_extra_state(loaded)
        elif key in copies:
            mine = local_of(rest[key]).detach()
            kept.add([mine])
            mine.copy_(loaded)
    for unit in units_below(module):
        unit.reshard()


def _first_names(module: nn.Module) -> Iterator[tuple[list[str], ParamSite]]:
    """Every managed parameter once, with all its names."""
    names: dict[tuple[int, int], list[str]] = {}
    sites: dict[tuple[int, int], ParamSite] = {}
    for name, site in named_sites(module):
        key = id(site.part), site.index
        names.setdefault(key, []).append(name)
        sites[key] = site
    return ((names[key], site) for key, site in sites.items())


def _load_optimizer(
    module: nn.Module, optimizer: Optimizer, folder: Path, stored: Stored, ahead: ReadAhead
) -> None:
    groups = optimizer_params(module, optimizer)
    flat = {named.name: named for group in groups for named in group}
    tensor_slices: list[TensorSlice] = []
    state: dict[str, dict[str, Any]] = {}
    keys: list[str] = []
    for key, entry in stored.entries.items():
        if key.startswith(GROUPS):
            keys.append(key)
        elif key.startswith(STATE):
            _, _, name, word = nested_path(key)
            if name in flat and isinstance(entry, StoredTensor):
                tensor_slice, value = _state_target(key, word, stored, flat[name])
                tensor_slices.append(tensor_slice)
                state.setdefault(name, {})[word] = value
            elif name in flat:
                keys.append(key)
    values = read_folder(folder, stored, tensor_slices, keys=keys, ahead=ahead)
    for key in keys:
        if key.startswith(STATE):
            _, _, name, word = nested_path(key)
            _must_have_place(word, values[key], flat[name])
            state.setdefault(name, {})[word] = values[key]
    load_pieces(optimizer, groups, state, options=_options(values, groups, optimizer))


def _state_target(
    key: str, word: str, stored: Stored, named: NamedParam
) -> tuple[TensorSlice, Tensor]:
    """Memory for one state tensor, or for this rank's piece of it."""
    tensor, piece = stored.tensor(key), named.piece
    place = place_of_dtensor(named.param)
    if place is not None and is_cut(word, tensor.shape, named.shape):
        local = torch.empty_like(local_of(named.param), dtype=tensor.dtype).contiguous()
        return slice_beside(key, local, place), place.over(local)
    rows = named.rows
    if rows and not is_cut(word, tensor.shape, named.shape) and tensor.shape[:1] == (rows.total,):
        value = torch.empty(rows.count, *tensor.shape[1:], dtype=tensor.dtype)
        return rows.slice_of(key, value), value
    if piece is None or named.site is None or not is_cut(word, tensor.shape, named.shape):
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        prefer_huge_pages(value)
        _must_have_place(word, value, named)
        return whole(key, value), value
    elements = torch.empty(piece.numel, dtype=tensor.dtype, device=named.param.device)
    prefer_huge_pages(elements)
    value = elements.as_strided(piece.shape, piece.stride)
    return slice_of(key, named.site, elements), value


def _must_have_place(word: str, value: Any, named: NamedParam) -> None:
    if named.piece is not None and (reason := no_place(word, value, named.shape, named)):
        raise StateError(reason)


def _options(
    values: Mapping[str, Any], groups: list[list[NamedParam]], optimizer: Optimizer
) -> list[dict[str, Any]]:
    """The options of each parameter group, by the names of its parameters where these were saved.

    Raises:
        CheckpointError: the checkpoint has no names and another number of groups.
        StateError: see `options_by_name`.
    """
    saved: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(GROUPS):
            _, _, position, option = nested_path(key)
            saved.setdefault(position, {})[option] = value
    if saved and all(_has_names(group) for group in saved.values()):
        return options_by_name(list(saved.values()), groups, optimizer)
    if sorted(saved) != list(range(len(groups))):
        raise CheckpointError(
            f"flat_param.load_sharded: the checkpoint has {len(saved)} parameter groups, but the "
            f"optimizer has {len(groups)}. Build it with the same groups, or load without it."
        )
    return [saved[position] for position in range(len(groups))]


def _has_names(group: Mapping[str, Any]) -> bool:
    names = group.get("params")
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
