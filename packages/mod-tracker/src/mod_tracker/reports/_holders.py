"""Live storages: their kind, the module and line that allocated them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn

from .._torch_compat import SAVED, saved_values, value_in
from ._allocations import AllocationMode, registered, storages_of
from ._causes import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from ._phase_totals import stack_of

KINDS = (
    *("parameters", "gradients", "optimizer", "inputs"),
    *("saved", "checkpoint", "temporaries", "unseen"),
)
"""Kinds of storages; the first one that applies is used."""

_NOT_ENTERED = (nn.Module, type, FrameType, ModuleType, GeneratorType, torch.optim.Optimizer)


@dataclass(frozen=True)
class Held:
    """A storage that is alive.

    Attributes:
        size: bytes.
        kind: one of `KINDS`. "saved": saved for backward by autograd. "checkpoint": saved by a
            checkpoint, or by other saved-tensor hooks, such as those of a policy or of offloading.
            "temporaries": not saved for backward. "unseen": allocated before the block, or in
            another thread.
        module: module that allocated it, or that registers its parameter; "" for none.
        stack: that module and those around it, the root first.
        phase: phase in which it was allocated; "" if unknown.
        line: file and line that allocated it; "" if unknown.
        shape: shape of the tensor.
        dtype: type of its elements.
        cause: one of the five of `MemoryReport.causes`.
        device: such as "cuda:0".
        address: address of its first byte; 0 if it has none.
    """

    size: int
    kind: str
    module: str
    stack: tuple[str, ...]
    phase: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    cause: str = ACTIVATIONS
    device: str = "cpu"
    address: int = 0


def what_is_held(
    mode: AllocationMode,
    roots: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer | None,
    inputs: dict[int, weakref.ref[torch.UntypedStorage]],
) -> list[Held]:
    """Return all live storages, largest first.

    Args:
        mode: an `AllocationMode` that records lines.
        roots: models by label.
        optimizer: optimizer with state; None to search for optimizers.
        inputs: inputs of the step, by `id` of the storage.
    """
    found: dict[int, Held] = {}

    def add(tensor: torch.Tensor, storage: torch.UntypedStorage, kind: str, name: str) -> None:
        if id(storage) in found or not storage.nbytes():
            return
        known = mode.known.get(id(storage))
        made = None if known is None else known.made
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        found[id(storage)] = Held(
            *(storage.nbytes(), kind, name, stack_of(name)),
            *(("", "") if made is None else (made.phase, made.line)),
            *(shape, dtype),
            cause=kind if kind in _CAUSES else ACTIVATIONS,
            **_place(storage),
        )

    def kind_of(key: int, otherwise: str) -> str:
        # The `id` of a freed input may have been reused.
        given = inputs.get(key)
        is_input = given is not None and given() is not None
        return "inputs" if is_input else graphs.kind(key) or otherwise

    optimizers = [optimizer] if optimizer is not None else _in_python(torch.optim.Optimizer)
    static = (
        ("parameters" if kind == "buffers" else kind, name, tensor)
        for kind, name, tensor in registered(roots, optimizers)
    )
    for kind, name, tensor in sorted(static, key=lambda each: KINDS.index(each[0])):
        for part, storage in storages_of([tensor]):
            add(part, storage, kind, name)
    tensors = _in_python(torch.Tensor)
    graphs = _Graphs(tensors)
    for key, known in list(mode.known.items()):
        alive, made = known(), known.made
        if key not in found and alive is not None and made is not None:
            path = made.call[0]
            found[key] = Held(
                *(known.size, kind_of(key, "temporaries"), path.name, path.stack),
                *(made.phase, made.line, made.shape, made.dtype),
                cause=mode.cause_of(known),
                **_place(alive),
            )
    for part, storage in storages_of([*tensors, *graphs.tensors]):
        if storage.device.type != "meta":  # meta tensors, as in a trace, have no bytes
            add(part, storage, kind_of(id(storage), "unseen"), "")
    return sorted(found.values(), key=lambda held: -held.size)


_CAUSES = (PARAMETERS, GRADIENTS, OPTIMIZER)


def _place(storage: torch.UntypedStorage) -> dict[str, Any]:
    """Return the device and the address of a storage; 0 for a fake one."""
    try:
        address = storage.data_ptr()
    except RuntimeError:
        address = 0
    return {"device": str(storage.device), "address": address}


class _Graphs:
    """Tensors that the graphs of some tensors save for backward.

    Tensors that a checkpoint saves are found in two ways: nodes of torch's checkpoint save its
    inputs; other checkpoints refer to them from pack results and hooks. The search does not enter
    modules or the globals of functions.

    Attributes:
        tensors: all of these tensors; some exist in C++ only.
    """

    def __init__(self, roots: list[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._saved: set[int] = set()
        self._instead: set[int] = set()
        waiting = list(saved_values(roots))
        seen: set[int] = set()
        for value in waiting:
            if value.hook is None:
                self._add([value.data], self._instead if value.of_checkpoint else self._saved)
            else:
                for kept in _reached([value.data, value.hook], seen):
                    if isinstance(kept, torch.Tensor):
                        self._add([kept], self._instead)
                    else:
                        waiting += value_in(kept, of_checkpoint=True)

    def _add(self, tensors: Iterable[torch.Tensor], keys: set[int]) -> None:
        for tensor, storage in storages_of(tensors):
            self.tensors.append(tensor)
            keys.add(id(storage))

    def kind(self, key: int) -> str | None:
        """Return "saved" or "checkpoint"; None if the storage is not saved."""
        if key in self._saved:
            return "saved"
        return "checkpoint" if key in self._instead else None


def _reached(things: list[Any], seen: set[int]) -> Iterator[Any]:
    """Yield the tensors and `SAVED` values that objects refer to."""
    waiting = [one for one in things if id(one) not in seen]
    seen.update(map(id, waiting))
    while waiting:
        thing = waiting.pop()
        kind = type(thing)
        if kind is SAVED or issubclass(kind, torch.Tensor):
            yield thing
        elif not issubclass(kind, _NOT_ENTERED):
            inside = [one for one in _referred(thing) if id(one) not in seen]
            seen.update(map(id, inside))
            waiting += inside


def _referred(thing: Any) -> list[Any]:
    if type(thing) is FunctionType:
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
    return gc.get_referents(thing)


def _in_python(kind: type) -> list[Any]:
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]
