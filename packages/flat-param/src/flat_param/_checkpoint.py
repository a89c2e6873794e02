"""Edge: a checkpoint written by many ranks without a word between them, whole or not at all.

Note [Layout on disk]
    checkpoint/.metadata                  names every file below; the checkpoint is what it names
    checkpoint/<attempt>-rank-0-of-2/     one rank's stretches; a checkpoint of its own
    checkpoint/<attempt>-rank-1-of-2/
A rank writes its folder under another name and renames it. Whoever then finds all folders of the
attempt there writes `.metadata`, also by renaming, and deletes what earlier attempts left. Until
that moment the earlier checkpoint is untouched; several ranks may do it, with the same result.
The attempt is a random word that the ranks draw from the process group's store.
"""

from __future__ import annotations

import os
import pickle
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ._dcp_read import METADATA, read_metadata
from ._errors import CheckpointError
from ._torch_compat import default_store

_saves = count()


def new_attempt() -> str:
    """A word that all ranks agree on, new at each call. Not a collective: the first rank names it.

    Every rank must call it equally often.
    """
    word = uuid.uuid4().hex[:12]
    store = default_store()
    if store is None:
        return word
    key = f"flat_param/save/{next(_saves)}"
    return str(store.compare_set(key, "", word).decode())


def rank_folder(path: Path, *, attempt: str, rank: int, world_size: int) -> Path:
    """Where one rank's part lies; see Note [Layout on disk]."""
    return path / f"{attempt}-rank-{rank}-of-{world_size}"


def put_in_place(draft: Path, folder: Path) -> None:
    """Rename a finished draft to its final name."""
    os.replace(draft, folder)


def commit(path: Path, *, attempt: str, world_size: int) -> bool:
    """Make the attempt the checkpoint if all its parts are there. Not a collective.

    Returns:
        Whether they were.
    """
    folders = [
        rank_folder(path, attempt=attempt, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    if not all(folder.is_dir() for folder in folders):
        return False
    merged = _merge(folders)
    draft = path / f"{METADATA}-{attempt}-{os.getpid()}"
    with draft.open("wb") as file:
        pickle.dump(merged, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path / METADATA)
    _delete_others(path, attempt)
    return True


def _merge(folders: Iterable[Path]) -> Metadata:
    """One description of all parts, with file names relative to their common folder."""
    merged = Metadata({}, planner_data={}, storage_data={})
    for folder in folders:
        part = read_metadata(folder)
        merged.planner_data.update(part.planner_data)
        for index, info in part.storage_data.items():
            relative = f"{folder.name}/{info.relative_path}"
            merged.storage_data[index] = replace(info, relative_path=relative)
        for key, stored in part.state_dict_metadata.items():
            _merge_key(merged.state_dict_metadata, key, stored)
    return merged


def _merge_key(merged: dict[str, Any], key: str, stored: Any) -> None:
    known = merged.setdefault(key, stored)
    if known is stored or not isinstance(stored, TensorStorageMetadata):
        return
    if known.size != stored.size:
        raise CheckpointError(
            f"flat_param.save_sharded: tensor '{key}' has shape {tuple(known.size)} on one rank "
            f"and {tuple(stored.size)} on another, but ranks must save one model. "
            "Build the same model on every rank."
        )
    known.chunks.extend(stored.chunks)


def _delete_others(path: Path, attempt: str) -> None:
    """Remove the parts of attempts that were replaced or never finished."""
    for pattern in ("*-rank-*-of-*", "draft-*"):
        for folder in path.glob(pattern):
            if attempt not in folder.name:
                shutil.rmtree(folder, ignore_errors=True)
