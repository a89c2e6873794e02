"""Count the bytes that a forward leaves for its backward; the other examples use this."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Every storage that an operator made; `bytes()` counts those that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in _tensors(out)):
            if storage._cdata not in given:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self) -> int:
        """Bytes of what is alive now."""
        gc.collect()
        return sum(size for reference, size in self.made.values() if not reference.expired())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def kept_bytes(forward: Callable[..., Any], **inputs: Any) -> int:
    """Bytes that a forward made and that are alive when it has ended; then runs the backward.

    `forward` gives a loss, or what has one.
    """
    with Alive() as alive:
        out = forward(**inputs)
        loss = getattr(out, "loss", out)
        del out
    kept = alive.bytes()
    loss.backward()
    return kept
