"""What backward reads again and its region did not make, as it was in the forward.

A replay or a recomputation reads parameters and inputs in backward that plain autograd would not:
it saved what was computed of them. A write past the version counter, as through `.data`, is seen
by nobody else.

Rule 1. What is small (biases, weights of norms) is copied. A replay reads the copy; a
        recomputation, which runs on the tensor itself, compares it.
Rule 2. Of what is larger a recomputation keeps a fingerprint and compares it: with its words in
        a table, the sum of each row and of each column. A change of up to three words is always
        seen, a change of more unless every sum stays the same, modulo 2**64.
        On the CPU it keeps a hash in place of both, of 64 bits.
Rule 3. A replay compares what it made with what that was (`recipe._proof`), not what it reads.
Rule 4. Each operator costs an accelerator a launch. So rows of the table overlap rather than leave
        words over, sums lie in one tensor, and many are compared at once (`_doubts`).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from functools import lru_cache
from typing import TypeVar

import torch
from torch.utils.weak import TensorWeakRef

from .._torch_compat import is_fake, is_freed, modes_entered, storage_key
from ._capturing import is_capturing
from ._doubts import doubts_here
from ._engine_disabled import own_work

_SMALL_BYTES = 4096
_SMALL_VECTOR_BYTES = 65536
_STEPS = (127, 113, 109, 107, 103, 101, 97, 89)
"""Words from row to row of a table, primes: no row of a usual matrix is a whole number of them."""
_LEAST_WORDS = 3 * _STEPS[0]
"""Fewer are kept themselves: of less than three rows a change of three words may not be seen."""
_WORD_BYTES = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

T = TypeVar("T")
Print = tuple[torch.Tensor, int]
"""Sums of rows and of columns of a tensor's words, with the bytes after the last word, and how many
bytes it has."""


class _Notes(threading.local):
    tensors: list[TensorWeakRef] | None = None
    working = False

    def __init__(self) -> None:
        self.stand_ins: dict[int, int] = {}


_notes = _Notes()


@contextmanager
def noting() -> Iterator[list[TensorWeakRef]]:
    """Note the copies and fingerprints that are made in here, to count those still alive."""
    before, _notes.tensors = _notes.tensors, []
    _notes.stand_ins.clear()
    try:
        yield _notes.tensors
    finally:
        _notes.tensors = before


def stands_for(tensor: torch.Tensor, original: torch.Tensor) -> None:
    """Note that one tensor is kept in place of another, while notes are taken."""
    if _notes.tensors is not None:
        _notes.stand_ins[storage_key(tensor)] = storage_key(original)


def original_of(key: int) -> int:
    """Storage that another stands in for; itself where it stands for none, of no copy any."""
    return _notes.stand_ins.get(key, key)


def stands_for_itself(key: int) -> None:
    """Note that a storage is new: one that was there before it may have stood for another."""
    _notes.stand_ins.pop(key, None)


_NOBODY = -1
"""No storage has this key."""


def is_guarding() -> bool:
    """Whether a copy or a fingerprint is being made."""
    return _notes.working


def _made(
    make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], tensor: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Make copies or sums of a tensor, unseen by the modes of regions around."""
    made = _alone(make, tensor.detach())
    if _notes.tensors is not None:
        _notes.tensors.extend(map(TensorWeakRef, made))
        _notes.stand_ins.update(dict.fromkeys(map(storage_key, made), _NOBODY))
    return made


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a copy is kept (Rule 1)."""
    limit = _SMALL_VECTOR_BYTES if tensor.dim() <= 1 else _SMALL_BYTES
    return tensor.numel() * tensor.element_size() <= limit


def fingerprint(tensor: torch.Tensor) -> Print:
    """Sum up the bits of a tensor; equal tensors in equal layout have equal fingerprints.

    Args:
        tensor: of any shape, strides and dtype of whole bytes.

    Returns:
        int64 sums modulo 2**64, (rows + columns,), or all words where these are few; and its bytes.
    """
    (sums,) = _hidden(_sums, tensor)
    return sums, tensor.numel() * tensor.element_size()


def print_words(size_bytes: int) -> int:
    """How many words the fingerprint of a tensor of so many bytes has."""
    words, tail = divmod(size_bytes, _WORD_BYTES)
    rows, columns, _ = _table_of(words)
    return rows + columns + bool(tail)


@lru_cache(maxsize=1024)
def _table_of(words: int) -> tuple[int, int, int]:
    """Rows and columns of a table of so many words, and the words from row to row.

    Rows are longer than the steps between them by what would be left over.
    """
    if words < _LEAST_WORDS:
        return 0, words, 0  # themselves
    step = min(_STEPS, key=lambda each: words % each)
    return words // step, step + words % step, step


def unnoticed(make: Callable[[torch.Tensor], T], tensor: torch.Tensor) -> T:
    """Compute from a tensor what nobody keeps, unseen by what counts operators and bytes."""
    if not modes_entered():  # nobody looks
        return make(tensor)
    with own_work():
        return _alone(make, tensor)


def _alone(make: Callable[[torch.Tensor], T], tensor: torch.Tensor) -> T:
    before, _notes.working = _notes.working, True
    try:
        return make(tensor)
    finally:
        _notes.working = before


def _hidden(
    make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], tensor: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    if not modes_entered():
        return _made(make, tensor)
    with own_work():
        return _made(make, tensor)


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor]:
    flat = _flat(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    count, tail = divmod(flat.numel() * flat.element_size(), _WORD_BYTES)
    raw = flat.view(torch.uint8) if tail else flat
    words = (raw[: count * _WORD_BYTES] if tail else flat).view(torch.int64)
    rows, columns, step = _table_of(count)
    found = words.new_empty(rows + columns + bool(tail))
    if step:
        table = words.as_strided((rows, columns), (step, 1))
        torch.sum(table, 1, out=found[:rows])
        torch.sum(table, 0, out=found[rows : rows + columns])
    else:
        found[:count].copy_(words)
    if tail:
        found[-1:].zero_().view(torch.uint8)[:tail].copy_(raw[count * _WORD_BYTES :])
    return (found,)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension, without a copy where they lie side by side."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.reshape(-1).contiguous()
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


class Guard:
    """One tensor as it was.

    Attributes:
        digest: what `digest` gave, on the CPU.
        copy: the tensor, where it is small and on another device.
        sums: its fingerprint, where it is not small; None where it has no data.
    """

    __slots__ = ("copy", "digest", "sums")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.copy: torch.Tensor | None = None
        self.digest: Digest | None = None
        self.sums: Print | None = None
        if is_fake(tensor):
            self.copy = small_copy(tensor)
        elif is_immediate(tensor):
            self.digest = digest(tensor)
        else:
            self.copy = small_copy(tensor)
            if self.copy is None:
                self.sums = fingerprint(tensor)

    def check(self, tensor: torch.Tensor, error: Callable[[], Exception]) -> None:
        """Raise `error` if the tensor is not as it was, bit by bit, or its memory was freed."""
        if is_freed(tensor):
            raise error()
        if self.digest is not None:
            if not self.is_same(tensor):
                raise error()
        elif self.copy is not None:
            _compare_copies(self.copy, tensor, error)
        elif self.sums is not None:
            compare(self.sums, tensor, error)

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is known to be as it was, without waiting for a device."""
        if self.digest is None or is_freed(tensor) or not is_immediate(tensor):
            return False
        return self.digest == digest(tensor)


Digest = tuple[object, int]


def digest(tensor: torch.Tensor) -> Digest:
    """Hash the bits of a tensor on the CPU; equal tensors have equal digests in one process.

    Of a small tensor the shape and dtype count, too; of others how many bytes there are.
    """
    small = is_small(tensor)
    if small and tensor.is_contiguous():
        return (tensor.shape, tensor.dtype), hash(string_at(tensor.data_ptr(), tensor.nbytes))
    sums = unnoticed(_sums_of, tensor)
    facts = (tensor.shape, tensor.dtype) if small else tensor.nbytes
    return facts, hash(string_at(sums.data_ptr(), sums.nbytes))


def _sums_of(tensor: torch.Tensor) -> torch.Tensor:
    return _sums(tensor.detach())[0]


def small_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy a tensor with its strides, where it is small and its memory was not freed."""
    limit = _SMALL_VECTOR_BYTES if tensor.dim() <= 1 else _SMALL_BYTES  # as `is_small` does
    return None if tensor.nbytes > limit or is_freed(tensor) else copied(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides."""
    if _notes.tensors is None and not modes_entered():  # nobody looks
        return (tensor.detach() if tensor.requires_grad else tensor).clone()
    return _hidden(_clone, tensor)[0]


def _clone(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor.clone(),)


def compare(sums: Print, tensor: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raise `error` if a tensor has another fingerprint.

    To ask an accelerator for the answer would make each replay wait for its queue, so the
    question is put once, when the backward ends. What is captured for a graph has no answer, and
    is not asked: no Python runs when the graph does.
    """
    if is_capturing(tensor.device):
        return
    compare_prints(sums, fingerprint(tensor), error)


def compare_prints(one: Print, other: Print, error: Callable[[], Exception]) -> None:
    """Raise `error` if two fingerprints are not of equal tensors, when `compare` would."""
    (before, size_bytes), (after, size_bytes_now) = one, other
    if size_bytes != size_bytes_now:
        raise error()
    if is_capturing(before.device):
        return
    doubts = None if is_immediate(before) else doubts_here()
    if doubts is not None:
        doubts.compare(before, after, error)
    elif not torch.equal(before, after):
        raise error()


def _compare_copies(
    before: torch.Tensor, now: torch.Tensor, error: Callable[[], Exception]
) -> None:
    if before.shape != now.shape or before.dtype != now.dtype:
        raise error()
    if is_capturing(now.device):
        return
    with own_work():
        one, other = _bits(before), _bits(now.detach())
        same = torch.equal(one, other) if is_immediate(now) else (one == other).all()
    _refuse_unless(same, error)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as integers: a number that is not one equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _refuse_unless(same: torch.Tensor | bool, error: Callable[[], Exception]) -> None:
    """Raise `error` unless `same`; of a tensor on an accelerator when backward ends."""
    waits = isinstance(same, torch.Tensor) and not is_immediate(same)
    doubts = doubts_here() if waits else None
    if doubts is not None:
        assert isinstance(same, torch.Tensor)
        doubts.ask(same, error)
    elif not same:
        raise error()


is_immediate: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")
"""Whether the numbers of a tensor's device are there without waiting."""
