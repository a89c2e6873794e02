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
from .._guards import compare, compare_prints, fingerprint, is_immediate, unnoticed

Proof = Any
"""A number for a value on the CPU, sums of its words elsewhere."""

_SMALL_BYTES = 16384
_WIDTH = 1021  # Words in a row of the table: a prime, so that no row is a tensor's.
_ROW_BYTES = _WIDTH * 8
_FOLDED = 16 * _WIDTH
"""Words that a large table is first added up to: its rows and columns would be read twice."""


class _Bytes(dict[int, Any]):
    """Types of so many bytes: ctypes takes longer to find them."""

    def __missing__(self, size: int) -> Any:
        found = self[size] = ctypes.c_char * size
        return found


_bytes = _Bytes()


def proof_of(tensor: torch.Tensor) -> Proof:
    """Sum up the bits of the whole storage a tensor lies in; None where it has no data."""
    if type(tensor) is not torch.Tensor and is_fake(tensor):
        return None
    if not is_immediate(tensor):
        return fingerprint(storage_of(tensor))
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if size <= _SMALL_BYTES:
        return size, hash(_bytes[size].from_address(address).raw)
    rows = size // _ROW_BYTES
    words = torch.frombuffer(
        (ctypes.c_char * size).from_address(address), dtype=torch.int64, count=rows * _WIDTH
    )
    # What lies after the last row is taken as it is.
    rest = ctypes.string_at(address + rows * _ROW_BYTES, size - rows * _ROW_BYTES)
    return size, hash((*unnoticed(_sums, words), rest))


def check(proof: Proof, tensor: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raise `error` if a tensor has another proof."""
    if type(proof[0]) is int:
        if proof != proof_of(tensor):
            raise error()
    else:
        compare(proof, storage_of(tensor), error)


def may_agree(one: Proof, other: Proof) -> bool:
    """Whether two proofs may be of the same bits, as far as is known without waiting."""
    return one is None or type(one[0]) is not int or one == other


def agree(one: Proof, other: Proof, error: Callable[[], Exception]) -> None:
    """Raise `error` if two proofs are of other bits."""
    if type(one[0]) is int:
        if one != other:
            raise error()
    else:
        compare_prints(one, other, error)


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the storage that a view lies in, unseen by what counts operators."""
    return unnoticed(_whole, tensor)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((numel,), (1,), 0)


def _sums(words: torch.Tensor) -> tuple[bytes, bytes]:
    """Sum up the rows and the columns of the words in a table."""
    if words.numel() >= 8 * _FOLDED:
        words = _folded(words)
    table = words.view(-1, _WIDTH)
    rows, columns = table.sum(1), table.sum(0)
    return (
        ctypes.string_at(rows.data_ptr(), rows.nbytes),
        ctypes.string_at(columns.data_ptr(), _ROW_BYTES),
    )


def _folded(words: torch.Tensor) -> torch.Tensor:
    """Add up words that lie a multiple of `_FOLDED` apart: only their sum is seen."""
    size = words.numel() // _FOLDED * _FOLDED
    folded, rest = words[:size].view(-1, _FOLDED).sum(0), words[size:]
    folded[: rest.numel()].add_(rest)
    return folded
