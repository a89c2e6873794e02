"""Load checkpoints of any number of ranks, and files of whole tensors.

All formats are read into one form: `model` and `optim` by name, with shards or full tensors as
values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import CheckpointError, FlatParamError
from .._torch_compat import set_element
from ..layout._arguments import check_is_module, path_of
from ._optim_state import NamedParam, optimizer_params
from ._state_dict import cut, is_extra, load_named, pieces_of, restored_on_error
from ._world import World

_STATE, _GROUPS = ("optim", "state"), ("optim", "param_groups")


def load_sharded(
    module: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load a checkpoint of any number of ranks; each rank reads its part. Collective.

    Checksums are compared, and no code of the checkpoint runs. All ranks load, or none: after an
    error on any rank, each has its previous parameters, buffers and optimizer state. Needs memory
    for one more copy of this rank's parameters.

    Args:
        module: sharded, or plain, which this process loads alone.
        path: a folder of `save_sharded` or `torch.distributed.checkpoint.save`, with the keys
            `model` and `optim` or a bare state dict; a folder of `save_pretrained`; or a
            file of safetensors or `torch.save` with full tensors.
        optimizer: of the module, whose state was saved by name; its groups may be in another
            order than when it was saved.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, hostile or of other shapes, or
            another rank cannot load it.
        StateError: the checkpoint lacks a tensor of the module, or the optimizer's groups do not
            fit the saved ones.
        ParameterError: the optimizer has a parameter that the module does not have.
    """
    check_is_module("load_sharded", module)
    source, world = path_of("load_sharded", path), World(module, "load_sharded", plain=True)
    with restored_on_error(module, optimizer) as own:
        error: Exception | None = None
        save_id = ""
        try:
            files = _whole_files(source)
            if files:
                pieces = pieces_of(module)
                items = (item for file in files for item in _items(file))
                state = {name: cut(value, pieces.get(name)) for name, value in items}
                state = state if isinstance(state.get("model"), Mapping) else {"model": state}
            else:
                state, save_id = _from_dcp(source, own, module, optimizer)
            if optimizer is not None and not state.get("optim"):
                raise CheckpointError(
                    f"flat_param.load_sharded: '{source}' has no optimizer state. Load it without "
                    "optimizer=."
                )
            load_named(module, state, optimizer)
        except FlatParamError as raised:
            error = raised
        except Exception as raised:
            why = f"{type(raised).__name__}: {str(raised)[:500]}"
            if isinstance(raised, UnpicklingError):  # torch advises to run the code
                why = "it has other objects than tensors and plain values, whose code would run"
            error = CheckpointError(
                f"flat_param.load_sharded: '{source}' cannot be read ({why}). A file is missing, "
                "cut short or damaged, or of another model. Load another checkpoint."
            )
            error.__cause__ = raised
        if len(world.agree(error, save_id)) > 1:
            raise _replaced(source)


def _replaced(source: Path) -> CheckpointError:
    return CheckpointError(
        f"flat_param.load_sharded: a save to '{source}' replaced the checkpoint while it was "
        "loaded. Load again when the save is over."
    )


# torch.distributed.checkpoint.


def _from_dcp(
    source: Path, own: Mapping[str, Any], module: nn.Module, optimizer: Optimizer | None
) -> tuple[dict[str, Any], str]:
    """This rank's part of a checkpoint by name, and the save's identity.

    The tensors of `own`, the module's state dict, are read in place.
    """
    from ._files import CheckedReader, read_into

    reader = CheckedReader(source)
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    known = metadata.planner_data or {}
    paths = {k: known.get(k, (k,)) for k in (*known, *entries) if k in entries}
    if any(type(at) is int and at > len(entries) for path in paths.values() for at in path):
        raise CheckpointError(
            f"flat_param.load_sharded: the metadata of '{source}' name a list with more items than "
            "there are values. Do not trust this checkpoint."
        )
    if not any(path[0] == "model" and len(path) > 1 for path in paths.values()):
        paths = {key: ("model", *path) for key, path in paths.items()}  # a bare state dict
    groups = [] if optimizer is None else optimizer_params(module, optimizer)
    params = {each.name: each for group in groups for each in group}
    target: dict[str, Any] = {}
    for key, path in paths.items():
        value = own.get(path[1]) if path[0] == "model" else None
        if isinstance(value, Tensor) and len(path) == 2 and not is_extra(path[1]):
            target[key] = value
        elif (path[0] == "model" and path[1] in own) or (params and path[:2] == _GROUPS):
            target[key] = _memory(entries[key])
        elif path[:2] == _STATE and len(path) > 3 and path[2] in params:
            piece = params[path[2]].piece
            if piece is not None and piece.skips:
                piece.is_stepped = True
            else:
                target[key] = _memory_for(path[3], entries[key], params[path[2]])
    save_id = _save_id(metadata)
    try:
        read_into(reader, metadata, target)
    except FileNotFoundError as error:
        if _save_id(reader.read_metadata()) != save_id:
            raise _replaced(source) from error
        raise
    missing = own.keys() - {path[1] for path in paths.values() if path[0] == "model"}
    empty = {name: own[name] for name in missing if is_extra(name) and not own[name]}
    state: dict[str, Any] = {"model": empty}
    for key, value in target.items():
        set_element(state, paths[key], value)
    if params and "optim" not in state and any(path[0] == "optim" for path in paths.values()):
        raise CheckpointError(
            f"flat_param.load_sharded: '{source}' was saved with flatten_optimizer_state_dict, "
            "which is not read. Load it with torch.distributed.checkpoint, or save it without."
        )
    return state, save_id


def _save_id(metadata: Any) -> str:
    return str(metadata.storage_meta and metadata.storage_meta.save_id)


def _memory(entry: Any) -> Tensor | None:
    """Memory for a tensor of the checkpoint; None for other values."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None


def _memory_for(word: str, entry: Any, named: NamedParam) -> Any:
    """Memory for one value of an optimizer's state."""
    if not hasattr(entry, "size"):
        return None
    size, dtype, piece = tuple(entry.size), entry.properties.dtype, named.piece
    device = named.param.device
    if piece is not None and word != "step" and size == piece.shape:
        return piece.present(torch.empty(piece.numel, dtype=dtype, device=device))
    if piece is not None and piece.blocks and size[:1] == (piece.blocks,):
        rows = torch.empty(piece.held_blocks, *size[1:], dtype=dtype, device=device)
        return piece.present_rows(rows)
    if piece is None and size == tuple(named.param.shape):
        return torch.empty_like(named.param.detach(), dtype=dtype)
    return _memory(entry)


# Files of full tensors.


_PRETRAINED = ("model.safetensors", "pytorch_model.bin")


def _whole_files(source: Path) -> list[Path]:
    """A file of full tensors, or the weight files in a folder of `save_pretrained`."""
    if source.is_file():
        return [source]
    for name in () if (source / ".metadata").exists() else _PRETRAINED:
        if (source / name).is_file():
            return [source / name]
        index = source / f"{name}.index.json"
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
            if any(Path(file).name != file for file in files):
                raise CheckpointError(
                    f"flat_param.load_sharded: '{index}' names files that are not in its folder. "
                    "Do not trust this folder."
                )
            return [source / file for file in sorted(files)]
    return []


def _items(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix != ".safetensors":
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"flat_param.load_sharded: file '{file}' holds a {type(state).__name__}, but a "
                "state dict is expected. Save module.state_dict()."
            )
        yield from state.items()
        return
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(
            f"flat_param.load_sharded: '{file}' needs the package safetensors, which is not "
            "installed. Install flat-param[safetensors], or save with torch.save."
        ) from error
    with safe_open(file, framework="pt") as found:
        for name in found.keys():  # noqa: SIM118  # it is no mapping
            yield name, found.get_tensor(name)
