"""What a region's operators have returned, to tell it from what the region found.

Known by identity, weakly: another tensor may have the identity of one that is gone. Views are known
by their base.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..._tensors import tensors_in
from ..._torch_compat import base_of, storage_key


class Made(dict[int, weakref.ref[torch.Tensor]]):
    """Tensors by identity, while the region's forward runs."""

    def add(self, out: Any) -> None:
        """Note what an operator returned that takes no view and writes to nothing."""
        if isinstance(out, torch.Tensor):
            self[id(out)] = weakref.ref(out)
        else:
            self.update((id(each), weakref.ref(each)) for each in tensors_in(out))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or what it is a view of, was returned by an operator."""
        base = base_of(tensor)
        root = tensor if base is None else base
        reference = self.get(id(root))
        return reference is not None and reference() is root

    def storages(self) -> set[int]:
        """Keys of the storages of all that is still there, where an alias tells no base."""
        alive = [reference() for reference in self.values()]
        return {
            storage_key(each) for each in alive if each is not None and each.layout is torch.strided
        }
