"""What a region writes to and did not make, as it was before: statistics, averages, codebooks.

A recomputation would read what the forward left there, which is another gradient, and write to it
a second time.

Rule 1. It is copied before the region's first write to it. Where that write leaves nothing of
        what was there, nothing is copied: no recomputation reads it before it writes.
Rule 2. A recomputation finds it as it was then. What has become of it since, by the region or by
        others, is there again when the recomputation ends; what was freed meanwhile stays so.
Rule 3. A kept batch norm does not run again, but later operators may read the statistics that it
        wrote to: they are kept as it left them, and put there in its place.
Rule 4. What the region makes is no part of this: a recomputation makes it again. Nor are values
        with a history, of which autograd sees every write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..._tensors import tensors_in
from ..._torch_compat import alias, base_of, is_fake, set_versions, storage_key
from ...policies._views import Operator
from .._engine_disabled import own_work
from .._guards import copied
from ._made import Made

_aten = torch.ops.aten
_OVERWRITES = frozenset(
    {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Values = tuple[tuple[torch.Tensor, torch.Tensor, int], ...]
"""Tensors, what is to be in them, and the bytes of their storage."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a recomputation found, and leaves behind (Rule 2).

    Attributes:
        values: of what the region writes to.
        tensors: the same, with their version counters.
        versions: theirs.
    """

    values: Values = ()
    tensors: tuple[torch.Tensor, ...] = ()
    versions: tuple[int, ...] = ()

    def leave(self) -> None:
        """Have it be there again, whatever interrupts that the first time."""
        try:
            self._leave()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        with own_work(), torch.no_grad():
            for tensor, value, size in self.values:
                if tensor.untyped_storage().nbytes() == size:
                    tensor.copy_(value)
        # Nobody who saved one before is to hear of writes that are no more.
        set_versions(self.tensors, self.versions)


class ExternalState:
    """What one forward of one region wrote to and did not make."""

    __slots__ = ("_before", "_left")

    def __init__(self) -> None:
        self._left: dict[Any, tuple[torch.Tensor, ...]] = {}
        self._before: dict[Any, tuple[torch.Tensor, torch.Tensor | None, int]] = {}

    def before_write(self, op: Operator, written: Any, made: Made) -> None:
        """Copy what is about to be written to for the first time (Rule 1).

        Args:
            op: the operator.
            written: what it writes to.
            made: what the region made (Rule 4).
        """
        for tensor in _plain(written):
            if made.has(tensor) or _has_history(tensor):
                continue
            key = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
            if key not in self._before and key[0] not in made.storages():
                before = None if op in _OVERWRITES else copied(tensor)
                self._before[key] = alias(tensor), before, tensor.untyped_storage().nbytes()

    @property
    def storages(self) -> set[int]:
        """Keys of the storages that were written to."""
        return {key[0] for key in self._before}

    def own_copy(self, out: Any) -> Any:
        """Copy what a write returned, to be kept: a recomputation puts there what was before it."""
        if isinstance(out, torch.Tensor) and storage_key(out) in self.storages:
            with own_work():
                return out.clone()
        return out

    def note_left(self, call: Any, written: Any) -> None:
        """Copy what a call that is kept wrote to, and does not return (Rule 3)."""
        self._left[call] = tuple(map(copied, _plain(written)))

    def leave_again(self, call: Any, written: Any) -> bool:
        """Write what the call wrote, in its place; return whether that is known."""
        left = self._left.get(call)
        if left is not None:
            with own_work(), torch.no_grad():
                for tensor, value in zip(_plain(written), left, strict=True):
                    tensor.copy_(value)
        return left is not None

    def put_back(self) -> Found:
        """Make it what it was (Rule 2); return what it is."""
        if not self._before:
            return Found()
        tensors = tuple(tensor for tensor, _, _ in self._before.values())
        versions = tuple(tensor._version for tensor in tensors)
        there = [
            (tensor.data, before, size)
            for tensor, before, size in self._before.values()
            if tensor.untyped_storage().nbytes() == size
        ]
        with own_work(), torch.no_grad():
            values = tuple((tensor, tensor.clone(), size) for tensor, _, size in there)
            found = Found(values, tensors, versions)
            try:
                for tensor, before, _ in reversed(there):  # parts of one storage may overlap
                    if before is not None:
                        tensor.copy_(before)
            except BaseException:
                found.leave()
                raise
        return found


def _plain(values: Any) -> list[torch.Tensor]:
    """The tensors among values that have bytes of their own."""
    return [
        each
        for each in tensors_in(values)
        if type(each) in _PLAIN
        and each.layout is torch.strided
        and not (each.is_inference() or is_fake(each))
    ]


def _has_history(tensor: torch.Tensor) -> bool:
    base = base_of(tensor)
    root = tensor if base is None else base
    return root.requires_grad and not root.is_leaf
