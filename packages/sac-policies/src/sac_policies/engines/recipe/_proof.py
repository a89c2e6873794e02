"""Whether a value that was rebuilt from its operands has the bits it had in the forward.

A write to an operand that nobody saved, in between the operator that made it and the one that
read it, is seen by no version counter. It shows in what is rebuilt.

The words of a large value on the CPU stand in a table, and its columns are added up modulo 2**64. A
change of one word is always seen. Several stay unseen only if they cancel in each column: words a
multiple of 251 apart. Neighbouring rows of a tensor have no place in common. Elsewhere a proof is
the fingerprint that `_guards` takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import string_at
from functools import partial
from typing import Any

import torch

from ..._torch_compat import is_fake
from .._guards import compare, compare_prints, fingerprint, is_immediate, unnoticed

Proof = Any
"""A number for a value on the CPU, sums of its words elsewhere."""

_SMALL_BYTES = 16384
_WORD_BYTES = 8
_WIDTHS = (251, 241, 239)
"""Words in a row of the table, primes: the first that does not divide the number of words, so that
no row of a tensor is a whole number of them, and rows that change places change the sums."""
_FOLDS, _LEAST_FOLDED = 16, 1 << 18
"""So many rows of a table of so many words are first added up side by side: that is faster."""


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
        return None if tensor.is_meta else fingerprint(storage_of(tensor))
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if size <= _SMALL_BYTES:
        return size, hash(_bytes[size].from_address(address).raw)
    words = size // _WORD_BYTES
    for width in _WIDTHS:
        if words % width:
            break
    sums = unnoticed(partial(_sums, width), tensor)
    # What lies after the last row is taken as it is.
    summed = words // width * width * _WORD_BYTES
    return size, hash((sums, string_at(address + summed, size - summed)))


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
    """Raise `error` if two proofs are of other bits; without one nobody looked."""
    if one is None or other is None:
        return
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


def _sums(width: int, tensor: torch.Tensor) -> bytes:
    """Add up the rows of the table of words that lie in a tensor's storage."""
    storage = tensor.untyped_storage()
    rows = storage.nbytes() // (width * _WORD_BYTES)
    table = _no_words.new_empty(0).set_(storage, 0, (rows, width), (width, 1))
    rest = None
    if rows * width >= _LEAST_FOLDED:
        folded = rows // _FOLDS * _FOLDS
        table, rest = table[:folded].view(-1, _FOLDS * width).sum(0), table[folded:].sum(0)
        table = table.view(_FOLDS, width)
    sums = table.sum(0)
    found = string_at(sums.data_ptr(), sums.nbytes)
    return found if rest is None else found + string_at(rest.data_ptr(), rest.nbytes)


_no_words = torch.empty(0, dtype=torch.int64, device="cpu")
