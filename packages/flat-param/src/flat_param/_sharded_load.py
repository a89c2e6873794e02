"""Edge: loads a checkpoint of any world size into a sharded module; each rank reads its part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from ._dcp_read import read_folder, read_metadata
from ._errors import CheckpointError
from ._optim_state import NamedParam, load_pieces, optimizer_params
from ._sharded_save import GROUPS, MODEL, STATE, nested_path, one_world
from ._slots import Slot
from ._state_dict import load_full_state_dict
from ._stretch import Stretch, whole
from ._whole import local_state, named_slots, units_below


def load_sharded(
    module: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load a checkpoint of any world size; each rank reads its part. Not a collective.

    Args:
        module: sharded.
        path: a folder in torch.distributed.checkpoint's format (ours or FSDP2's), or a file with
            a plain state dict (FSDP1's full one too) that `torch.save` wrote.
        optimizer: of the module; must already have its parameter groups.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, of another model, or tries to run
            code.
    """
    source = Path(path)
    if source.is_file():
        load_full_state_dict(module, _read_file(source), optimizer=optimizer)
        return
    one_world(module)
    metadata = read_metadata(source)
    prefix = _prefix(metadata)
    _load_model(module, source, metadata, prefix)
    if optimizer is not None:
        _load_optimizer(module, optimizer, source, metadata)


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


def _prefix(metadata: Metadata) -> str:
    """`model.`, or nothing where a bare state dict was saved."""
    nested = any(key.startswith(MODEL) for key in metadata.state_dict_metadata)
    return MODEL if nested else ""


def _load_model(module: nn.Module, folder: Path, metadata: Metadata, prefix: str) -> None:
    stretches = []
    for names, slot in _first_names(module):
        name = next((n for n in names if prefix + n in metadata.state_dict_metadata), names[0])
        piece = slot.part.pieces[slot.index]
        target = piece.flat(slot.part.shard)
        stretches.append(Stretch(prefix + name, piece.spec, piece.start, target))
    rest = local_state(module)
    copies = {
        key: value.clone(memory_format=torch.contiguous_format)
        for key, value in rest.items()
        if isinstance(value, Tensor)
    }
    stretches += [whole(prefix + key, copy) for key, copy in copies.items()]
    read_folder(folder, metadata, stretches)
    for key, copy in copies.items():
        rest[key].copy_(copy)
    for unit in units_below(module):
        unit.reshard()


def _first_names(module: nn.Module) -> Iterator[tuple[list[str], Slot]]:
    """Every managed parameter once, with all its names."""
    names: dict[tuple[int, int], list[str]] = {}
    slots: dict[tuple[int, int], Slot] = {}
    for name, slot in named_slots(module):
        key = id(slot.part), slot.index
        names.setdefault(key, []).append(name)
        slots[key] = slot
    return ((names[key], slot) for key, slot in slots.items())


def _load_optimizer(
    module: nn.Module, optimizer: Optimizer, folder: Path, metadata: Metadata
) -> None:
    groups = optimizer_params(module, optimizer)
    flat = {named.name: named for group in groups for named in group}
    stretches: list[Stretch] = []
    state: dict[str, dict[str, Any]] = {}
    keys: list[str] = []
    for key, stored in metadata.state_dict_metadata.items():
        if key.startswith(GROUPS):
            keys.append(key)
        elif key.startswith(STATE):
            _, _, name, entry = nested_path(key)
            if name in flat and isinstance(stored, TensorStorageMetadata):
                stretch, value = _state_target(key, stored, flat[name])
                stretches.append(stretch)
                state.setdefault(name, {})[entry] = value
            elif name in flat:
                keys.append(key)
    values = read_folder(folder, metadata, stretches, keys=keys)
    for key in keys:
        if key.startswith(STATE):
            _, _, name, entry = nested_path(key)
            state.setdefault(name, {})[entry] = values[key]
    load_pieces(optimizer, groups, state, options=_options(values, len(groups)))


def _state_target(
    key: str, stored: TensorStorageMetadata, named: NamedParam
) -> tuple[Stretch, Tensor]:
    """Memory for one state tensor, or for this rank's piece of it."""
    dtype, piece = stored.properties.dtype, named.piece
    if piece is None or tuple(stored.size) != piece.spec.shape:
        value = torch.empty(stored.size, dtype=dtype)
        return whole(key, value), value
    elements = torch.empty(piece.numel, dtype=dtype, device=named.param.device)
    value = elements.as_strided(piece.shape, piece.stride)
    return Stretch(key, piece.spec, piece.start, elements), value


def _options(values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The options of each parameter group.

    Raises:
        CheckpointError: the checkpoint has another number of groups.
    """
    groups: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(GROUPS):
            _, _, position, option = nested_path(key)
            groups.setdefault(position, {})[option] = value
    if sorted(groups) != list(range(count)):
        raise CheckpointError(
            f"flat_param.load_sharded: the checkpoint has {len(groups)} parameter groups, but the "
            f"optimizer has {count}. Build it with the same groups, or load without it."
        )
    return [groups[position] for position in range(count)]
