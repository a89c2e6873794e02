"""Fingerprints of tensors, to compare a replay with the forward bit by bit.

A fingerprint is the tensor's words in a table, summed by row and column modulo 2**64; a tensor of
few words is its own fingerprint. A change of up to three words is always detected; a change of more
words is detected unless every sum stays the same.

Each operator costs a kernel launch on an accelerator. So rows of the table overlap instead of
leaving a remainder, and all sums are in one tensor. Results of comparisons are read at the end of
backward: reading them earlier would synchronize with the device at each replay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache

import torch

from .._torch_compat import after_backward, is_fake, is_freed
from .._torch_compat._dispatch import no_dispatch

_STEP = 127
"""Words from row to row of a table, a prime: no row of a usual matrix is a whole number of them."""
_LEAST_WORDS = 3 * _STEP
"""In less than three rows a change of three words may not be seen."""
_WORD_BYTES = 8


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured. `device` gives the device type."""
    ask = _asks(device.type)
    return ask is not None and ask()


@cache
def _asks(kind: str) -> Callable[[], bool] | None:
    if kind in ("cpu", "meta"):
        return None
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)


_is_immediate: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")
"""Whether the numbers of a tensor's device are there without waiting."""


class Fingerprint:
    """The fingerprint of one tensor.

    Args:
        tensor: one that `is_comparable`. No dispatch mode may see its operators.
    """

    __slots__ = ("_nbytes", "_sums")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._nbytes, self._sums = tensor.nbytes, sums_of(_resolved(tensor))

    def check(self, tensor: torch.Tensor, error: Callable[[], Exception]) -> None:
        """Raise `error` if a tensor has other bits, or its memory was freed.

        On an accelerator the result is read at the end of backward. In a graph capture nothing is
        compared.
        """
        tensor = _resolved(tensor)
        if is_freed(tensor) or tensor.nbytes != self._nbytes:
            raise error()
        if _is_immediate(tensor):
            if not torch.equal(self._sums, sums_of(tensor)):
                raise error()
        elif not is_capturing(tensor.device):
            _raise_unless((self._sums == sums_of(tensor)).all(), error)


def is_comparable(tensor: torch.Tensor) -> bool:
    """Whether the bits of a tensor are there and defined: a workspace of bytes has padding."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and tensor.dtype is not torch.uint8 and not is_fake(tensor)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without lazy conjugation and negation."""
    return tensor.detach().resolve_conj().resolve_neg()


def _raise_unless(same: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raise `error` at the end of backward if `same` is False; at once outside of a backward.

    The autograd engine holds the comparison, and drops it if the backward fails.
    """

    def settle() -> None:
        if not same:
            raise error()

    if not after_backward(settle):
        settle()


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return int64 sums of the bits of a tensor: of rows, then of columns; all words if few."""
    with no_dispatch(), torch.no_grad():
        return _sums(tensor.detach())


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = _flat(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    count, tail = divmod(flat.numel() * flat.element_size(), _WORD_BYTES)
    raw = flat.view(torch.uint8) if tail else flat
    words = (raw[: count * _WORD_BYTES] if tail else flat).view(torch.int64)
    rows, columns = _table_of(count)
    found = words.new_empty(rows + columns + bool(tail))
    if rows:
        table = words.as_strided((rows, columns), (_STEP, 1))
        torch.sum(table, 1, out=found[:rows])
        torch.sum(table, 0, out=found[rows : rows + columns])
    else:
        found[:count].copy_(words)
    if tail:
        found[-1:].zero_().view(torch.uint8)[:tail].copy_(raw[count * _WORD_BYTES :])
    return found


def _table_of(words: int) -> tuple[int, int]:
    """Return rows and columns of a table for a number of words; rows overlap by the remainder."""
    if words < _LEAST_WORDS:
        return 0, words  # the words themselves
    return words // _STEP, _STEP + words % _STEP


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension, without a copy if they are contiguous."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1).contiguous()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
