"""Reads a pickle of torch's checkpoint metadata without making any of its objects.

Every class that the pickle names becomes an empty one, made anew for this file: an object of it
holds what the pickle says of it, and does nothing. Real classes stay out of reach, so that a
file can neither run their code nor change them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from .._errors import CheckpointError

_NAMED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
}


_ENUMERATIONS = {"_MEM_FORMAT_ENCODING"}


class _Inert:
    """An object that is only described."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Inert:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], type[_Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMED.get(module, ()):
            return self._made.setdefault((module, name), type(name, (_Inert,), {}))
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise CheckpointError(
            f"flat_param.load: the metadata names '{module[:80]}.{name[:80]}', but only the "
            "classes of torch.distributed.checkpoint's format may appear there. Do not trust "
            "this file."
        )


def _member(owner: Any, name: Any) -> _Inert:
    """A member of an enumeration, which Python 3.11 before 3.11.4 pickles by its name.

    Raises:
        CheckpointError: an attribute of anything else is asked for.
    """
    of_class = isinstance(owner, type) and issubclass(owner, _Inert)
    if not of_class or owner.__name__ not in _ENUMERATIONS or type(name) is not str:
        raise CheckpointError(
            "flat_param.load: the metadata asks for an attribute, but only members of "
            "enumerations may be named. Do not trust this file."
        )
    member: _Inert = owner(name)
    return member


def load_inert(data: bytes) -> Any:
    """What the pickle at the start of `data` describes.

    Raises:
        CheckpointError: it names anything that does not belong there.
        Exception: it is damaged.
    """
    return _Unpickler(io.BytesIO(data)).load()


def fields_of(value: Any, name: str, *, kind: type = dict) -> Any:
    """The state of an inert object of the class of that name.

    Raises:
        TypeError: it is anything else.
    """
    if isinstance(value, _Inert) and type(value).__name__ == name:
        state = {} if kind is dict and value.state is None else value.state
        if type(state) is kind:
            return state
    raise TypeError(f"{type(value).__name__} where a {name} is expected")


def ints_of(value: Any) -> tuple[Any, ...]:
    """The numbers in an inert torch.Size, or in a tuple or list.

    Raises:
        TypeError: it is anything else.
    """
    if isinstance(value, _Inert) and type(value).__name__ == "Size":
        (value,) = value.args or ((),)
    if type(value) not in (tuple, list):
        raise TypeError(f"{type(value).__name__} where a shape is expected")
    return tuple(value)
