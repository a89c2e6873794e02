"""Reads from a tape what autograd saves in one forward, and what is made again for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .._torch_compat import saved_tensor_hooks, storage_bytes, storage_under
from .._torch_compat._dispatch import no_dispatch
from ..eager._masks import UNPACK
from ..eager._recorders import table_of
from ..eager._tape import Region, Tape
from ..eager._values import Call, Value
from ..policies._rules import RECOMPUTE_ALL
from ..policies._unmatched import watch_of
from ._constants import TracedConstant
from ._trace import TracedPack


@dataclass(frozen=True, slots=True)
class Made:
    """Which call made a storage, and which of that call's storages it is."""

    call: int
    output: int


Makers = Callable[[torch.UntypedStorage], "Made | None"]
"""Finds the maker of a storage; None for what the function was given."""
_GIVEN = Made(-1, 0)


class SavedTensors(Tape):
    """A tape that keeps nothing it can replay, and lists what autograd saves.

    Args:
        made: finds the maker of a storage.
    """

    def __init__(self, made: Makers) -> None:
        policy = RECOMPUTE_ALL
        region = Region(policy, table_of(policy), watch_of(policy), None, checks=False)
        super().__init__(region, saved_tensor_hooks())
        self.takes_fakes = True
        self._maker_of = made
        self._found: list[tuple[Value, Made, int]] = []
        self._bits: set[Value] = set()
        self._tensors: dict[Value, torch.Tensor] = {}

    def _pack(self, tensor: torch.Tensor) -> Any:
        packed = super()._pack(tensor)
        if isinstance(packed, Value):
            with no_dispatch():
                self._tensors[packed] = tensor.detach()
                self._found.append((packed, self._made(tensor), storage_bytes(tensor)))
        return packed

    def _unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor itself: a replay would be listed as a call of the function."""
        tensor = self._tensors.get(saved)
        return super()._unpack(saved) if tensor is None else tensor

    def _made(self, tensor: torch.Tensor) -> Made:
        storage = storage_under(tensor)
        return (None if storage is None else self._maker_of(storage)) or _GIVEN

    def note_mask(self, mask: torch.Tensor, version: int) -> None:
        """Note the bits that are held in place of a mask."""
        super().note_mask(mask, version)
        seen = self._known.get(id(mask))
        if seen is not None and isinstance(seen.value, Call):
            self._bits.add(seen.value.inputs[0])

    def listed(self) -> tuple[tuple[TracedPack, ...], tuple[TracedConstant, ...]]:
        """List what was saved, in order, and what else is held to make it again."""
        self._tensors.clear()
        saved = {value for value, _, _ in self._found}
        places: dict[Any, int] = {}
        constants: list[TracedConstant] = []

        def place(value: Value) -> int | None:
            made, size = self._constant(value)
            if made is None or not size:
                return None
            key = made if made.call >= 0 else value
            if key not in places:
                places[key] = len(constants)
                constants.append(TracedConstant(made.call, made.output, size))
            return places[key]

        packs = []
        for value, made, size in self._found:
            call = value.made_by if value.held is None else None
            if call is not None and call.recorder is UNPACK:
                bits = call.inputs[0].held
                packs.append(_pack_of("", made, 0 if bits is None else storage_bytes(bits)))
                continue
            if call is None:
                held = value.held
                packs.append(_pack_of("", made, size if held is None else storage_bytes(held)))
                continue
            found = (place(each) for each in _held_behind(call, saved))
            reads = tuple(sorted({at for at in found if at is not None}))
            packs.append(_pack_of(str(call.recorder.op), made, size, reads))
        return tuple(packs), tuple(constants)

    def _constant(self, value: Value) -> tuple[Made | None, int]:
        """Return the maker of a held value and its bytes; None for what the function was given."""
        held = value.held
        if held is None:
            return None, 0
        if value in self._bits:
            return _GIVEN, storage_bytes(held)
        made = self._made(held)
        return (None if made == _GIVEN else made), storage_bytes(held)


def _pack_of(producer: str, made: Made, size: int, reads: tuple[int, ...] = ()) -> TracedPack:
    return TracedPack(producer, made.call, made.output, size, reads)


def _held_behind(call: Call, saved: set[Value]) -> list[Value]:
    """List the held values that a call reads, directly or by calls of which nothing is saved."""
    found: dict[Value, None] = {}
    seen: set[Value] = set()
    stack = [call]
    while stack:
        for each in stack.pop().inputs:
            if each in seen:
                continue
            seen.add(each)
            maker = each.made_by
            if each.held is not None or maker is None:
                found[each] = None
            elif each not in saved:
                stack.append(maker)
    return list(found)
