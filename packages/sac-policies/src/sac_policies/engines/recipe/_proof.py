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
    count = size // _WORD_BYTES
    words = torch.frombuffer(
        (ctypes.c_char * size).from_address(address), dtype=torch.int64, count=count
    )
    rows, columns = map(_bytes, unnoticed(_sums, words))
    summed = count // _WIDTH * _WIDTH * _WORD_BYTES
    return size, hash((rows, columns, ctypes.string_at(address + summed, size - summed)))


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
    """Return all elements of the storage that a view lies in."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((numel,), (1,), 0)


def _sums(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum up the rows and the columns of the words in a table, without those after the last row."""
    table = words.as_strided((words.numel() // _WIDTH, _WIDTH), (_WIDTH, 1))
    return table.sum(1), table.sum(0)


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
