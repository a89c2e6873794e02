"""Storages that are alive: who made them, where in the code, and what holds them."""

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
from ._memory import KeptTensor
from ._phase_totals import stack_of

KINDS = (
    *("parameters", "gradients", "optimizer", "inputs"),
    *("saved", "checkpoint", "temporaries", "unseen"),
)
"""What a storage is held as: the first of these that it is."""

_NOT_ENTERED = (nn.Module, type, FrameType, ModuleType, GeneratorType, torch.optim.Optimizer)


@dataclass(frozen=True)
class Held:
    """A storage that is alive.

    Attributes:
        size: bytes.
        kind: one of `KINDS`. "saved" is what autograd keeps for backward by itself; "checkpoint"
            is what is kept in its place: inputs of regions that run again, and what hooks for
            saved tensors of somebody else hold, such as values that a policy keeps or that are
            offloaded to the CPU. "temporaries" are results that nothing keeps for a backward;
            "unseen" are those that were made before the block, or by another thread.
        module: module that made it, or registers the parameter it belongs to; "" for none.
        stack: that module and those around it, the root first.
        phase: in which phase it was made; "" if that was not seen.
        line: file and line of the code that made it; "" if that was not seen.
        shape: of the tensor that was made.
        dtype: of its elements.
        cause: one of the five of `MemoryReport.causes`.
        device: where it is, such as "cuda:0".
        address: of its first byte; 0 if it has none.
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
    """Return everything that is alive, each storage once, largest first.

    Args:
        mode: has followed what was made, with the lines.
        roots: models by label.
        optimizer: whose state there is; None to look for optimizers.
        inputs: what the step was given, by `id` of the storage.
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
        # An input that is gone says nothing: its number may be another's by now.
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
        if storage.device.type != "meta":  # a trace's tensors have no bytes, nor always a size
            add(part, storage, kind_of(id(storage), "unseen"), "")
    return sorted(found.values(), key=lambda held: -held.size)


_CAUSES = (PARAMETERS, GRADIENTS, OPTIMIZER)


def _place(storage: torch.UntypedStorage) -> dict[str, Any]:
    """Return the device and the address of a storage; 0 where it has none, as a stand-in."""
    try:
        address = storage.data_ptr()
    except RuntimeError:
        address = 0
    return {"device": str(storage.device), "address": address}


class _Graphs:
    """What the graphs behind some tensors keep for backward.

    What a checkpoint keeps is found as torch lets anybody keep it: inputs by a node of torch's
    checkpoint, all else by hooks for saved tensors, in what they have made of a tensor or beside
    it, without going into modules or into what a function takes from its file.

    Attributes:
        tensors: all that is kept; no others hold those that only C++ has.
    """

    def __init__(self, roots: list[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._saved: set[int] = set()
        self._instead: set[int] = set()
        waiting = list(saved_values(roots))
        seen: set[int] = set()
        for value in waiting:
            own = value.data.tensor if isinstance(value.data, KeptTensor) else value.data
            if value.hook is None or own is not value.data:
                self._add([own], self._instead if value.of_checkpoint else self._saved)
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
        """Return as what a storage is kept; None if it is not."""
        if key in self._saved:
            return "saved"
        return "checkpoint" if key in self._instead else None


def _reached(things: list[Any], seen: set[int]) -> Iterator[Any]:
    """Return the tensors that things hold, and those that torch's checkpoint saved there."""
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
