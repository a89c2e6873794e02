"""Live storages: their kind, the module and line that allocated them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from ._allocations import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    AllocationMode,
    device_of,
    registered,
    storages_of,
)
from ._rows import stack_of
from ._saved import in_python, kept_by, node_of

KINDS = (
    *("parameters", "gradients", "optimizer", "inputs"),
    *("saved", "checkpoint", "temporaries", "unseen"),
)
"""Kinds of storages; the first one that applies is used."""


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
            device=device_of(tensor),
            address=_address(storage),
        )

    def kind_of(key: int, otherwise: str) -> str:
        # The `id` of a freed input may have been reused.
        given = inputs.get(key)
        is_input = given is not None and given() is not None
        return "inputs" if is_input else graphs.kind(key) or otherwise

    optimizers = [optimizer] if optimizer is not None else in_python(torch.optim.Optimizer)
    static = (
        ("parameters" if kind == "buffers" else kind, name, tensor)
        for kind, name, tensor in registered(roots, optimizers)
    )
    for kind, name, tensor in sorted(static, key=lambda each: KINDS.index(each[0])):
        for part, storage in storages_of([tensor]):
            add(part, storage, kind, name)
    tensors = in_python(torch.Tensor)
    graphs = _Graphs(tensors)
    for key, known in list(mode.known.items()):
        alive, made = known(), known.made
        if key not in found and alive is not None and made is not None:
            path = made.call[0]
            found[key] = Held(
                *(known.size, kind_of(key, "temporaries"), path.name, path.stack),
                *(made.phase, made.line, made.shape, made.dtype),
                cause=mode.cause_of(known),
                device=known.memory.device,
                address=_address(alive),
            )
    for part, storage in storages_of([*tensors, *graphs.tensors]):
        if storage.device.type != "meta":  # meta tensors, as in a trace, have no bytes
            add(part, storage, kind_of(id(storage), "unseen"), "")
    return sorted(found.values(), key=lambda held: -held.size)


_CAUSES = (PARAMETERS, GRADIENTS, OPTIMIZER)


def _address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage; 0 for one without data, such as a fake one."""
    return 0 if storage.device.type == "meta" else storage.data_ptr()


class _Graphs:
    """Tensors that the graphs of some tensors keep for backward.

    Attributes:
        tensors: all of these tensors; some exist in C++ only.
    """

    def __init__(self, roots: list[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._kinds: dict[int, str] = {}
        for _, tensor, is_saved in kept_by(map(node_of, roots)):
            for part, storage in storages_of([tensor]):
                self.tensors.append(part)
                if is_saved or id(storage) not in self._kinds:
                    self._kinds[id(storage)] = "saved" if is_saved else "checkpoint"

    def kind(self, key: int) -> str | None:
        """Return "saved" or "checkpoint"; None if the storage is not saved."""
        return self._kinds.get(key)
