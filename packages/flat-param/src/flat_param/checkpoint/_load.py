"""Load checkpoints of any number of ranks, and files of whole tensors.

All formats are read into one form: `model` and `optim` by name, with shards or full tensors as
values.
"""

from __future__ import annotations

import hashlib
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
from ..sharded._full_params import local_state
from ._optim_state import NamedParam, names_by_key, optimizer_params, pieces_of
from ._put_back import is_extra, put_back_on_error
from ._state_dict import cut, load_named, tied_names
from ._world import World

STATE, GROUPS = ("optim", "state"), ("optim", "param_groups")


def load_sharded(
    module: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load a checkpoint of any number of ranks; each rank reads its part. Collective.

    Checksums are compared, and no code of the checkpoint runs. All ranks load, or none: after an
    error on any rank, each has its previous parameters, buffers and optimizer state. Needs memory
    for one more copy of this rank's parameters.

    Args:
        module: sharded.
        path: a folder of `save_sharded` or `torch.distributed.checkpoint.save`, with the keys
            `model` and `optim` or a bare state dict; a folder of `save_pretrained`; or a
            file of safetensors or `torch.save` with full tensors.
        optimizer: of the module; its groups may be in another order than when it was saved.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, of another model or hostile, or
            another rank cannot load it.
        StateError: the module is not sharded, or the optimizer's groups do not fit the saved ones.
        ParameterError: the optimizer has a parameter that the module does not have.
    """
    check_is_module("load_sharded", module)
    source, world = path_of("load_sharded", path), World(module, "load_sharded")
    with put_back_on_error(module, optimizer):
        error: Exception | None = None
        read = _mark(source)
        try:
            _load(module, source, optimizer)
        except FlatParamError as raised:
            error = raised
        except Exception as raised:
            error = _unfit(source, raised)
        marks = world.comm.share(read)
        if _mark(source) != read or len(set(marks)) > 1:
            error = _replaced(source)
        world.agree(error)


def _mark(source: Path) -> str:
    """A digest that differs between saves: all ranks must read the same save."""
    try:
        return hashlib.sha256((source / ".metadata").read_bytes()).hexdigest()
    except OSError:
        return ""


def _replaced(source: Path) -> CheckpointError:
    return CheckpointError(
        f"flat_param.load_sharded: a save to '{source}' replaced the checkpoint while it was "
        "loaded. Load again when the save is over."
    )


def _load(module: nn.Module, source: Path, optimizer: Optimizer | None) -> None:
    files = _whole_files(source)
    state = _from_files(files, module) if files else _from_dcp(source, module, optimizer)
    if optimizer is not None and not state.get("optim"):
        raise CheckpointError(
            f"flat_param.load_sharded: '{source}' has no optimizer state. Load it without "
            "optimizer=."
        )
    load_named(module, state, optimizer)


def _unfit(source: Path, error: Exception) -> CheckpointError:
    if isinstance(error, UnpicklingError):  # torch advises to run the code
        why = "it has other objects than tensors and plain values, whose code would run"
    else:
        why = f"{type(error).__name__}: {str(error)[:500]}"
    raised = CheckpointError(
        f"flat_param.load_sharded: '{source}' cannot be read ({why}). A file is missing, cut short "
        "or damaged, or of another model. Load another checkpoint."
    )
    raised.__cause__ = error
    return raised


# torch.distributed.checkpoint.


def _from_dcp(source: Path, module: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """This rank's part of a checkpoint, by name. The model's tensors are read in place."""
    from ._files import CheckedReader

    reader = CheckedReader(source)
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    known = metadata.planner_data or {}
    paths = {k: _split(known.get(k, (k,))) for k in (*known, *entries) if k in entries}
    is_bare = not any(path[0] == "model" and len(path) > 1 for path in paths.values())
    target, state = _model_memory(module, entries, source, prefix="" if is_bare else "model.")
    if optimizer is not None:
        target |= {k: _memory(entries[k]) for k, path in paths.items() if path[:2] == GROUPS}
    _put(state if not is_bare else state["model"], reader, metadata, target, paths)
    if optimizer is not None and "optim" in state:
        groups = state["optim"]["param_groups"]
        if isinstance(groups, dict):  # torch's flatten_optimizer_state_dict: one for each parameter
            groups = [{"params": [name], **options} for name, options in groups.items()]
        state["optim"]["param_groups"] = groups
        target = _optimizer_memory(module, optimizer, groups, entries, paths)
        _put(state, reader, metadata, target, paths)
    return state


def _split(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of a value; words that `flatten_optimizer_state_dict` has joined are split."""
    if path[0] != "optim" or path[:2] in (STATE, GROUPS) or len(path) < 2:
        return path
    part, _, rest = path[1].partition(".")
    name, _, word = rest.rpartition(".")
    return ("optim", part, name, word, *path[2:])


def _put(
    state: dict[str, Any],
    reader: Any,
    metadata: Any,
    target: dict[str, Any],
    paths: Mapping[str, tuple[Any, ...]],
) -> None:
    """Read values, and put each at its path in a state."""
    from ._files import read_into

    values = {**target, **read_into(reader, metadata, target)}
    for key in sorted(values, key={key: at for at, key in enumerate(paths)}.__getitem__):
        set_element(state, paths[key], values[key])


def _model_memory(
    module: nn.Module, entries: Mapping[str, Any], source: Path, *, prefix: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Memory for a module's tensors by key, and a state with its other values."""
    others = {name: own for own in tied_names(module) for name in own}
    buffers = local_state(module)  # in the buffers' own dtypes
    target: dict[str, Any] = {}
    without: dict[str, Any] = {}
    for name, value in {**module.state_dict(), **buffers}.items():
        names = others.get(name, [name])
        key = prefix + next((n for n in (name, *names) if prefix + n in entries), name)
        inner = [k for k in entries if k.startswith(f"{key}.")] if is_extra(name) else []
        if isinstance(value, Tensor) and key in entries and not is_extra(name):
            _check_size(name, tuple(value.shape), entries[key], source)
            target[key] = value
        elif key in entries or inner:
            target |= {k: _memory(entries[k]) for k in inner or [key]}
        elif is_extra(name) and not value:
            without[name] = value
        else:
            raise CheckpointError(
                f"flat_param.load_sharded: '{name}' is not in '{source}', but the module has it. "
                f"The checkpoint is of another model, with {len(entries)} keys such as "
                f"{sorted(entries)[:2]}."
            )
    return target, {"model": without}


def _memory(entry: Any) -> Tensor | None:
    """Memory for a tensor of the checkpoint; None for other values."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None


def _check_size(name: str, shape: tuple[int, ...], entry: Any, path: object) -> None:
    size = tuple(getattr(entry, "size", ()))
    if not hasattr(entry, "size") or size != shape:
        raise CheckpointError(
            f"flat_param.load_sharded: '{name}' has shape {size} in '{path}', but the module's has "
            f"{shape}. The checkpoint is of another model."
        )


def _optimizer_memory(
    module: nn.Module,
    optimizer: Optimizer,
    saved: list[dict[str, Any]],
    entries: Mapping[str, Any],
    paths: dict[str, tuple[Any, ...]],
) -> dict[str, Any]:
    """Memory for the state of an optimizer's parameters by key; positions in paths become names."""
    groups = optimizer_params(module, optimizer)
    names = {str(key): name for key, name in names_by_key(saved, groups).items()}  # as in paths
    own = {each.name: each for group in groups for each in group}
    target: dict[str, Any] = {}
    for key, path in list(paths.items()):
        named = own.get(names.get(path[2], "")) if path[:2] == STATE else None
        if named is not None and named.piece is not None and named.piece.skips:
            named.piece.is_stepped = True
        elif named is not None:
            target[key] = _memory_for(path[3], entries[key], named)
            paths[key] = (*path[:2], named.name, *path[3:])
    return target


def _memory_for(word: str, entry: Any, named: NamedParam) -> Any:
    """Memory for one state value; None if it is no tensor."""
    if not hasattr(entry, "size"):
        return None
    size, dtype, piece = tuple(entry.size), entry.properties.dtype, named.piece
    device = named.param.device
    if piece is not None and word != "step" and size == piece.shape:
        return piece.present(torch.empty(piece.shard.numel, dtype=dtype, device=device))
    if piece is not None and piece.blocks and size[:1] == (piece.blocks,):
        rows = torch.empty(piece.held_blocks, *size[1:], dtype=dtype, device=device)
        return piece.present_rows(rows)
    if piece is None and size == tuple(named.param.shape):
        return torch.empty_like(named.param.detach(), dtype=dtype)
    return torch.empty(size, dtype=dtype)


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


def _from_files(files: list[Path], module: nn.Module) -> Mapping[str, Any]:
    """A state of files; sharded parameters are cut as soon as they are read."""
    pieces = pieces_of(module)
    state = {name: cut(value, pieces.get(name)) for file in files for name, value in _items(file)}
    return state if isinstance(state.get("model"), Mapping) else {"model": state}


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
