"""Finds the bytes that a tape holds of each call, for reports."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from .._tensors import tensors_in
from .._torch_compat import storage_bytes, storage_key
from ..policies._plans import Call
from ._recorders import Recorder
from ._values import Value


class Observed:
    """Records which call made each storage, and the values held after the forward.

    Attributes:
        moved_from: calls with a result that was copied to the host.
    """

    def __init__(self) -> None:
        self.moved_from: set[Call] = set()
        self._made: dict[int, tuple[Call, str]] = {}
        self._values: list[ref[Value]] = []

    def called(self, recorder: Recorder, index: int, out: Any) -> None:
        """Record the storages that a call made."""
        if recorder.shares:
            return
        tensors = tensors_in(out)
        is_float = all(tensor.is_floating_point() for tensor in tensors)
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self._made or not recorder.facts.writes:
                self._made[key] = (str(recorder.op), index), _reason(recorder, is_float)

    def replaced(self, held: torch.Tensor, original: torch.Tensor) -> None:
        """Record that a tensor is held instead of another one."""
        made = self._made.get(storage_key(original))
        self._made.pop(storage_key(held), None)
        if made is not None:
            self._made[storage_key(held)] = made

    def moved(self, tensor: torch.Tensor) -> None:
        made = self._made.get(storage_key(tensor))
        if made is not None:
            self.moved_from.add(made[0])

    def ended(self, values: list[ref[Value]]) -> None:
        self._values += values

    def held(self) -> dict[Call, tuple[int, str]]:
        """Return the bytes held of each call's results, and why.

        Each storage counts once; inputs of the region do not count.
        """
        found: dict[Call, tuple[int, str]] = {}
        counted: set[int] = set()
        live = (each() for each in self._values)
        for tensor in (value.held for value in live if value is not None):
            key = None if tensor is None else storage_key(tensor)
            made = None if key is None else self._made.get(key)
            if tensor is None or key is None or made is None or key in counted:
                continue
            counted.add(key)
            call, why = made
            found[call] = found.get(call, (0, ""))[0] + storage_bytes(tensor), why
        return found


def _reason(recorder: Recorder, is_float: bool) -> str:
    """Return why a result is held although the policy does not keep it."""
    if not torch.is_grad_enabled():
        return "it was made without gradients"
    if is_float and recorder.why == "integer results are held":
        return "it is small" if recorder.reduces else "it was written to"
    return recorder.why
