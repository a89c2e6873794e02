"""Whether a value that was rebuilt from its operands has the bits it had in the forward.

A write to an operand that nobody saved, in between the operator that made it and the one that
read it, is seen by no version counter. It shows in what is rebuilt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ..._torch_compat import is_fake
from .._guards import compare, fingerprint, is_immediate, unnoticed

Proof = Any
"""A number for a value on the CPU, sums of its words elsewhere."""

_SMALL_BYTES = 16384
_WIDTHS = (1021, 1013)  # Words in a row of two tables: primes, so that no row is a tensor's.
_WORD_BYTES = 8


def proof_of(tensor: torch.Tensor) -> Proof:
    """Sum up the bits of the whole storage a tensor lies in; None where it has no data."""
    if is_fake(tensor):
        return None
    if not is_immediate(tensor):
        return fingerprint(storage_of(tensor))
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if size <= _SMALL_BYTES:
        return size, hash(ctypes.string_at(address, size))
    sums = [_bytes(each) for each in unnoticed(_columns, tensor)]
    rest = size % _WORD_BYTES
    return size, hash((*sums, ctypes.string_at(address + size - rest, rest)))


def check(proof: Proof, tensor: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raise `error` if a tensor has another proof."""
    if type(proof[0]) is int:
        if proof != proof_of(tensor):
            raise error()
    else:
        compare(proof, storage_of(tensor), error)


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the storage that a view lies in."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((numel,), (1,), 0)


def _columns(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum up the columns of the words in two tables, and keep the words after the last rows."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // _WORD_BYTES
    words = torch.empty(0, dtype=torch.int64).set_(storage, 0, (count,), (1,))
    parts: list[torch.Tensor] = []
    for width in _WIDTHS:
        rows = count // width
        parts.append(words[: rows * width].view(rows, width).sum(0))
        parts.append(words[rows * width :])
    return tuple(parts)


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
