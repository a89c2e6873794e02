"""Loads checkpoints of any number of ranks into a sharded module."""

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

from .._errors import CheckpointError, FlatParamError, StateError
from ..layout._arguments import check_is_module, path_of
from ..sharded._by_hand import units_below
from ..sharded._full_params import local_state, named_sites
from ..sharded._param_piece import ParamPiece
from ._optim_state import NamedParam, load_named_state, optimizer_params, options_by_name
from ._put_back import is_extra, owner_of_extra, put_back_on_error
from ._state_dict import load_model, load_whole, tied_names
from ._world import World

MODEL, STATE, GROUPS = "model.", "optim.state.", "optim.param_groups"


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
    if source.is_dir() and not (source / ".metadata").exists():
        files = _pretrained_files(source)
        if files:
            if optimizer is not None:
                raise CheckpointError(
                    f"flat_param.load_sharded: '{source}' has the weights of a model, but no "
                    "optimizer state. Load it without optimizer=."
                )
            load_model(module, _state_in(files, module))
            return
    if source.is_file():
        if source.suffix == ".safetensors":
            load_model(module, _state_in([source], module))
        else:
            load_whole(module, _read_file(source), optimizer)
        return
    from ._files import CheckedReader

    reader = CheckedReader(source)
    metadata = reader.read_metadata()
    _load_model(module, reader, metadata)
    if optimizer is not None:
        _load_optimizer(module, optimizer, reader, metadata)


def _unfit(source: Path, error: Exception) -> CheckpointError:
    raised = CheckpointError(
        f"flat_param.load_sharded: '{source}' cannot be loaded ({type(error).__name__}: "
        f"{str(error)[:500]}). It is damaged, or of another model."
    )
    raised.__cause__ = error
    return raised


# torch.distributed.checkpoint.


def _load_model(module: nn.Module, reader: Any, metadata: Any) -> None:
    from ._files import read_into

    entries = metadata.state_dict_metadata
    prefix = MODEL if any(key.startswith(MODEL) for key in entries) else ""
    others = {name: own for own in tied_names(module) for name in own}
    buffers = local_state(module)  # in the buffers' own dtypes
    target: dict[str, Any] = {}
    extra: dict[str, str] = {}
    for name, value in {**module.state_dict(), **buffers}.items():
        names = others.get(name, [name])
        key = prefix + next((n for n in (name, *names) if prefix + n in entries), name)
        if is_extra(name):
            inner = [k for k in entries if k == key or k.startswith(f"{key}.")]
            if inner or value:
                extra[key] = name
            target |= {k: _memory(entries[k]) for k in inner}
            if inner or not value:
                continue
        if key not in entries:
            raise CheckpointError(
                f"flat_param.load_sharded: '{name}' is not in '{reader.path}', but the module has "
                f"it. The checkpoint is of another model, with {len(entries)} keys such as "
                f"{sorted(entries)[:2]}."
            )
        if isinstance(value, Tensor) and key not in target:
            _check_size(name, tuple(value.shape), entries[key], reader.path)
            target[key] = value
    values = read_into(reader, metadata, target)
    paths = metadata.planner_data or {}
    for key, name in extra.items():
        owner_of_extra(module, name).set_extra_state(_joined(key, {**target, **values}, paths))
    for unit in units_below(module):
        unit.reshard()


def _memory(entry: Any) -> Tensor | None:
    """Memory for a tensor of the checkpoint; None for other values."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None


def _joined(key: str, values: Mapping[str, Any], paths: Mapping[str, Any]) -> Any:
    """The value under a key, such as `optim.param_groups`, of which torch saves each item."""
    if key in values:
        return values[key]
    root: dict[Any, Any] = {}
    for item in (each for each in values if each.startswith(f"{key}.")):
        words = list(paths.get(item) or [key, item.removeprefix(f"{key}.")])
        start = next(n for n in range(len(words)) if ".".join(map(str, words[: n + 1])) == key)
        *outer, last = words[start + 1 :]
        node = root
        for word in outer:
            node = node.setdefault(word, {})
        node[last] = values[item]
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    found = {word: _with_lists(value) for word, value in node.items()}
    if found and all(type(word) is int for word in found):
        return [found[at] for at in sorted(found)]
    return found


def _check_size(name: str, shape: tuple[int, ...], entry: Any, path: object) -> None:
    size = tuple(getattr(entry, "size", ()))
    if not hasattr(entry, "size") or size != shape:
        raise CheckpointError(
            f"flat_param.load_sharded: '{name}' has shape {size} in '{path}', but the module's has "
            f"{shape}. The checkpoint is of another model."
        )


def _load_optimizer(module: nn.Module, optimizer: Optimizer, reader: Any, metadata: Any) -> None:
    from ._files import read_into

    groups = optimizer_params(module, optimizer)
    flat = {named.name: named for group in groups for named in group}
    entries = metadata.state_dict_metadata
    target: dict[str, Any] = {}
    places: dict[str, tuple[str, str]] = {}
    paths = metadata.planner_data or {}
    order = {key: at for at, key in enumerate(paths)}  # in a state dict the order may differ
    for key in sorted(entries, key=lambda key: order.get(key, len(order))):
        entry = entries[key]
        if key.startswith(STATE):
            name, _, word = key.removeprefix(STATE).rpartition(".")
            piece = flat[name].piece if name in flat else None
            if piece is not None and piece.skips:
                piece.is_stepped = True
            elif name in flat:
                places[key] = name, word
                target[key] = _memory_for(word, entry, flat[name])
        elif key.startswith(GROUPS):
            target[key] = _memory(entry)
    values = {**target, **read_into(reader, metadata, target)}
    state: dict[str, dict[str, Any]] = {}
    for key, (name, word) in places.items():
        state.setdefault(name, {})[word] = values[key]
    saved = _saved_groups(values, paths, flat)
    load_named_state(
        optimizer, groups, state, options=_options(saved, groups, optimizer, reader.path)
    )


def _memory_for(word: str, entry: Any, named: NamedParam) -> Any:
    """Memory for one state value; None if it is no tensor."""
    if not hasattr(entry, "size"):
        return None
    size, dtype, piece = tuple(entry.size), entry.properties.dtype, named.piece
    device = named.param.device
    if piece is not None and word != "step" and size == piece.shape:
        return piece.present(torch.empty(piece.shard.numel, dtype=dtype, device=device))
    rows = None if piece is None else piece.rows
    if piece is not None and rows is not None and size[:1] == (rows.total,):
        return piece.present_rows(torch.empty(rows.count, *size[1:], dtype=dtype, device=device))
    if piece is None and size == tuple(named.param.shape):
        return torch.empty_like(named.param.detach(), dtype=dtype)
    if piece is not None:
        _check_uncut(word, size, piece, named.name)
    return torch.empty(size, dtype=dtype)


def _check_uncut(word: str, size: tuple[int, ...], piece: ParamPiece, name: str) -> None:
    if size and piece.shard.numel not in (0, piece.whole_numel):
        raise StateError(
            f"flat_param.load_sharded: optimizer state '{word}' of parameter '{name}' has shape "
            f"{size}, and this rank has {piece.shard.numel} of the parameter's "
            f"{piece.whole_numel} elements, but only tensors of the parameter's shape, or "
            'with a row for each of its blocks, can be cut. Shard with boundary="tensor", or with '
            "Blocks as the optimizer has them; or load without it."
        )


def _saved_groups(
    values: Mapping[str, Any], paths: Mapping[str, Any], names: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the options of saved parameter groups; `params` lists names, if these were saved.

    With torch's `flatten_optimizer_state_dict`, each parameter is a group.
    """
    named: dict[str, dict[str, Any]] = {}
    numbered: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith(GROUPS):
            name, _, option = key.removeprefix(f"{GROUPS}.").rpartition(".")
            if name in names:
                named.setdefault(name, {"params": [name]})[option] = value
            else:
                numbered[key] = value
    return [*named.values(), *(_joined(GROUPS, numbered, paths) if numbered else ())]


def _options(
    saved: list[dict[str, Any]],
    groups: list[list[NamedParam]],
    optimizer: Optimizer,
    path: object,
) -> list[dict[str, Any]]:
    """The options of each parameter group, matched by parameter names if they were saved."""
    if not saved:
        raise CheckpointError(
            f"flat_param.load_sharded: '{path}' has no optimizer state. Load it without optimizer=."
        )
    if all(_has_names(group) for group in saved):
        return options_by_name(saved, groups, optimizer)
    if len(saved) != len(groups):
        raise CheckpointError(
            f"flat_param.load_sharded: the checkpoint has {len(saved)} parameter groups, but the "
            f"optimizer has {len(groups)}. Build it with the same groups, or load without it."
        )
    return saved


def _has_names(group: Mapping[str, Any]) -> bool:
    names = group.get("params")
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


# Files of full tensors.


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if isinstance(error, UnpicklingError):
            first = "it has other objects than tensors and plain values, whose code would run"
        else:
            first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"flat_param.load_sharded: file '{path}' cannot be read ({first}). It is damaged or "
            "no state dict. Save module.state_dict() with torch.save, or pass the folder of a "
            "checkpoint."
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"flat_param.load_sharded: file '{path}' holds a {type(state).__name__}, but a state "
            "dict is expected. Save module.state_dict()."
        )
    return state


_PRETRAINED = ("model.safetensors", "pytorch_model.bin")


def _pretrained_files(folder: Path) -> list[Path]:
    """Return the weight files in a folder of `save_pretrained`."""
    for name in _PRETRAINED:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                files = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"flat_param.load_sharded: '{index}' is no index of weights ({error!r}). It is "
                    "damaged: load another folder."
                ) from error
            if any(Path(file).name != file for file in files):
                raise CheckpointError(
                    f"flat_param.load_sharded: '{index}' names files that are not in its folder. "
                    "Do not trust this folder."
                )
            return [folder / file for file in sorted(files)]
    return []


def _state_in(files: list[Path], module: nn.Module) -> dict[str, Any]:
    """A state dict of files; sharded parameters are cut as soon as they are read."""
    sites = dict(named_sites(module))
    state: dict[str, Any] = {}
    for file in files:
        for name, value in _tensors_in(file):
            site = sites.get(name)
            piece = None if site is None else site.part.param_pieces[site.index]
            fits = piece is not None and piece.is_cut and tuple(value.shape) == piece.shape
            state[name] = piece.present(piece.elements(value)) if piece and fits else value
    return state


def _tensors_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix != ".safetensors":
        yield from _read_file(file).items()
        return
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"flat_param.load_sharded: '{file}' needs the package safetensors, which is not "
            "installed. Install flat-param[safetensors], or save with torch.save."
        ) from error
    try:
        with safe_open(file, framework="pt") as found:
            for name in found.keys():  # noqa: SIM118  # it is no mapping
                yield name, found.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"flat_param.load_sharded: '{file}' cannot be read ({error}). It is cut short or "
            "damaged: load another one."
        ) from error
