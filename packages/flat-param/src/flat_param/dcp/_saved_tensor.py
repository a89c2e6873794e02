"""Where a tensor's elements are in what `torch.save` has written of it.

`torch.save` writes a zip archive without compression: a pickle that describes the tensor, and the
bytes of its storage a little behind it. Who knows where these begin can read them to where they
belong, in place of a tensor that is copied from. The pickle is read without making any of its
objects.

Rule: whatever looks in any way different is None, and torch reads it.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HEADER = struct.Struct("<4s4xH16xHH")  # signature, compression, lengths of name and of padding
_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in an archive, dense and row-major.

    Args:
        dtype: of its elements.
        sizes: its shape.
        start: its first byte in the archive.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.sizes) * self.dtype.itemsize


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host that is one piece of memory; not kept alive."""
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


def find_saved_tensor(head: memoryview) -> SavedTensor | None:
    """What the first bytes of an archive say of its one tensor, or None; see the Rule.

    Args:
        head: 4 KiB are enough.
    """
    data = bytes(head[:4096])
    try:
        dtype, key, sizes = _described(data[_content(data, 0) :])
        archive = data[_HEADER.size : data.index(b"/data.pkl")]
        order = _content(data, _header_of(data, archive + b"/byteorder"))
        if not data.startswith(sys.byteorder.encode(), order):
            return None
        start = _content(data, _header_of(data, archive + b"/data/" + key.encode()))
        return SavedTensor(dtype, sizes, start)
    except Exception:
        return None


def _header_of(data: bytes, name: bytes) -> int:
    return data.index(name) - _HEADER.size


def _content(data: bytes, header: int) -> int:
    """Where an entry's bytes begin.

    Raises:
        ValueError: it is compressed, or no entry.
    """
    signature, compression, *lengths = _HEADER.unpack_from(data, header)
    if signature != b"PK\3\4" or compression:
        raise ValueError("not stored as it is")
    return header + _HEADER.size + sum(lengths)


def _described(data: bytes) -> tuple[torch.dtype, str, tuple[int, ...]]:
    """Dtype, the storage's name and shape.

    Raises:
        Exception: it is not the pickle of one dense, row-major tensor and its whole storage.
    """
    function, (storage, first, sizes, stride, _, hooks, *rest) = _Unpickler(io.BytesIO(data)).load()
    _, kind, key, _, length = storage
    if function == "_rebuild_tensor_v3":  # of a storage of bytes
        (dtype,) = rest
        length //= dtype.itemsize
    else:
        () = rest
        dtype = _STORAGES[kind]
    numbers = (first, length, *sizes, *stride)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("no sizes")
    if hooks or first or length != math.prod(sizes) or not _is_row_major(sizes, stride):
        raise ValueError("another tensor")
    return dtype, key, sizes


def _is_row_major(sizes: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(sizes), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return not all(sizes)
        expected *= size
    return True


class _Unpickler(pickle.Unpickler):
    """Reads functions as what they are called with, and storages as what is said of them."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return lambda *args: (name, args)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module == "torch" and name in _STORAGES) or name == "UntypedStorage":
            return name
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise pickle.UnpicklingError(name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        return pid
