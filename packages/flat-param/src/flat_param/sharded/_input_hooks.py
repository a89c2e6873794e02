"""Hooks on what goes into a module and comes out, which tell that it has its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ._tensors import producers, tensors_in


class InputHooks:
    """One hook for each tensor, which may be an input of many steps.

    Args:
        told: a method of whoever is to know; it is not kept alive.

    Attributes:
        count: inputs hooked since they were last forgotten.
    """

    def __init__(self, told: Callable[[], None]) -> None:
        assert isinstance(told, MethodType)
        self.count = 0
        self._told = weakref.WeakMethod(told)
        self._hooked: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._handles: dict[int, RemovableHandle] = {}

    def add(self, inputs: Any) -> None:
        """Be told once of each gradient of the tensors in `inputs`."""
        for tensor in tensors_in(inputs):
            if tensor.requires_grad and self._hooked.get(id(tensor)) is not tensor:
                self.count += 1
                self._hooked[id(tensor)] = tensor
                self._handles[id(tensor)] = tensor.register_hook(partial(_tell, self._told))

    def clear(self) -> None:
        """No backward pass will come back to what went in so far."""
        self.count = 0
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._hooked.clear()


def _tell(told: weakref.WeakMethod[Any], _: Tensor) -> None:
    method = told()
    if method is not None:
        method()


def hook_nodes(outputs: Any, told: Callable[[object], None]) -> bool:
    """Place a hook on the autograd node of each output; say whether there was one."""
    nodes = [node for tensor in tensors_in(outputs) for node in producers(tensor)]
    for node in nodes:
        node.register_prehook(told)
    return bool(nodes)
