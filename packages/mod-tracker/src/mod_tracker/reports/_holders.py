"""Storages that are alive: who made them, where in the code, and what holds them."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from types import FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn

from .._edges import tensors_in
from .._names import walk
from .._record import Call
from .._torch_compat import SAVED, buffers_of, parameters_of, saved_values, value_in
from ._allocations import Allocation, KeptTensor, storages_of
from ._causes import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER, PARAMETERS, LogitsAndLoss

KINDS = (
    *("parameters", "gradients", "optimizer", "inputs"),
    *("saved", "checkpoint", "temporaries", "unseen"),
)
"""What a storage is held as: the first of these that it is."""

# With the separator: torchvision begins as torch does.
_OWN = f"{FilePath(__file__).parent.parent}{os.sep}"
_NOT_ENTERED = (nn.Module, type, FrameType, ModuleType, GeneratorType, torch.optim.Optimizer)
_SKIPPED = (f"{FilePath(torch.__file__).parent}{os.sep}", _OWN, "<")


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


@dataclass(frozen=True)
class _Made:
    allocation: Allocation
    call: Call
    phase: str
    line: str
    shape: tuple[int, ...]
    dtype: str


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; () for a nested one of torch's older kind, which has none."""
    try:
        return tuple(tensor.shape)
    except RuntimeError:
        return ()


class Ledger:
    """What is alive of all that was seen being made, and what is known of it otherwise."""

    def __init__(self) -> None:
        self.logits: LogitsAndLoss | None = None
        self._made: dict[int, _Made] = {}
        self._inputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.saved: dict[int, int] = {}

    def add(self, made: Allocation, tensor: torch.Tensor, call: Call, phase: str) -> None:
        """Write down a storage that was made now."""
        shape, dtype = shape_of(tensor), str(tensor.dtype).removeprefix("torch.")
        self._made[made.key] = _Made(made, call, phase, line_here(), shape, dtype)

    def renew(self, made: Allocation) -> None:
        """Write down the new size of a storage."""
        if made.key in self._made:
            self._made[made.key] = replace(self._made[made.key], allocation=made)

    def drop(self, key: int) -> None:
        """Cross out a storage that is gone."""
        self._made.pop(key, None)

    def pack(self, tensor: torch.Tensor) -> KeptTensor:
        """Note that a tensor is saved for backward."""
        keys = [id(storage) for _, storage in storages_of([tensor])]
        for key in keys:
            self.saved[key] = self.saved.get(key, 0) + 1
        return KeptTensor(tensor, keys, self._release)

    def _release(self, key: int) -> None:
        left = self.saved.pop(key, 1) - 1
        if left:
            self.saved[key] = left

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what a step was given; what the step before was given is that no more."""
        stored = storages_of(tensors)
        self._inputs = {id(storage): weakref.ref(storage) for _, storage in stored}

    def _is_input(self, key: int) -> bool:
        # One that is gone says nothing: its number may be another's by now.
        noted = self._inputs.get(key)
        return noted is not None and noted() is not None

    def by_line(self) -> dict[tuple[str, str], int]:
        """Return the bytes alive by module and line, of what was seen being made."""
        found: defaultdict[tuple[str, str], int] = defaultdict(int)
        for made in list(self._made.values()):
            found[made.call[0].name, made.line] += made.allocation.size
        return dict(found)

    def held(
        self, roots: dict[str, nn.Module], optimizer: torch.optim.Optimizer | None
    ) -> list[Held]:
        """Return everything that is alive, each storage once, largest first."""
        found: dict[int, Held] = {}

        def add(tensor: torch.Tensor, kind: str, name: str) -> None:
            for part, storage in storages_of([tensor]):
                if storage.nbytes() and id(storage) not in found:
                    made = self._made.get(id(storage))
                    device, address = _place(storage)
                    found[id(storage)] = Held(
                        *(storage.nbytes(), kind, name, _stack(name)),
                        *(("", "") if made is None else (made.phase, made.line)),
                        *(tuple(part.shape), str(part.dtype).removeprefix("torch.")),
                        cause=kind if kind in _CAUSES else ACTIVATIONS,
                        device=device,
                        address=address,
                    )

        optimizers = [optimizer] if optimizer is not None else _python_optimizers()
        static = sorted(_static(roots, optimizers), key=lambda found: KINDS.index(found[1]))
        for tensor, kind, name in static:
            add(tensor, kind, name)
        tensors = list(_python_tensors())
        graphs = _Graphs(tensors)
        for key, made in list(self._made.items()):
            storage = made.allocation()
            if key in found or storage is None:
                continue
            kept = graphs.kind(key, self.saved.get(key, 0)) or "temporaries"
            kind = "inputs" if self._is_input(key) else kept
            path, (device, address) = made.call[0], _place(storage)
            found[key] = Held(
                *(made.allocation.size, kind, path.name, path.names(), made.phase, made.line),
                *(made.shape, made.dtype),
                cause=self._cause_of(made.allocation),
                device=device,
                address=address,
            )
        for part, storage in storages_of([*tensors, *graphs.tensors]):
            if storage.device.type != "meta":  # a trace's tensors have no bytes, nor always a size
                key = id(storage)
                kept = graphs.kind(key, 0) or "unseen"
                add(part, "inputs" if self._is_input(key) else kept, "")
        return sorted(found.values(), key=lambda held: -held.size)

    def _cause_of(self, made: Allocation) -> str:
        is_logits = self.logits is not None and self.logits.has(made.number)
        return made.cause or (LOGITS if is_logits else ACTIVATIONS)


_CAUSES = (PARAMETERS, GRADIENTS, OPTIMIZER)


def _place(storage: torch.UntypedStorage) -> tuple[str, int]:
    """Return the device and the address of a storage; 0 where it has none, as a stand-in."""
    try:
        return str(storage.device), storage.data_ptr()
    except RuntimeError:
        return str(storage.device), 0


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
        self._own: Counter[int] = Counter()
        waiting = list(saved_values(roots))
        seen: set[int] = set()
        for value in waiting:
            if isinstance(value.data, KeptTensor):
                self._own.update(value.data.keys if value.of_checkpoint else ())
            elif value.hook is None:
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

    def kind(self, key: int, uses: int) -> str | None:
        """Return as what a storage is kept that `uses` nodes are known to have saved."""
        if key in self._saved or uses > self._own[key]:
            return "saved"
        return "checkpoint" if uses or key in self._instead else None


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


def line_here() -> str:
    """Return file and line of the innermost code that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{FilePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _static(
    roots: dict[str, nn.Module], optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[torch.Tensor, str, str]]:
    for label, root in roots.items():
        for name, module in walk(root, label):
            for buffer in buffers_of(module).values():
                if buffer is not None:
                    yield buffer, "parameters", name
            for parameter in parameters_of(module).values():
                if parameter is None:
                    continue
                yield parameter, "parameters", name
                if parameter.grad is not None:
                    yield parameter.grad, "gradients", name
                for optimizer in optimizers:
                    for value in tensors_in(optimizer.state.get(parameter, {})):
                        yield value, "optimizer", name


def _python_tensors() -> Iterable[torch.Tensor]:
    return (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))


def _python_optimizers() -> list[torch.optim.Optimizer]:
    kind = torch.optim.Optimizer
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _stack(name: str) -> tuple[str, ...]:
    parts = name.split(".") if name else []
    return tuple(".".join(parts[: end + 1]) for end in range(len(parts)))
