"""Hooks that a forward registers, in its second run.

Rule 1. A hook that the first run registered on a tensor from outside, such as an input or a
        parameter, has stayed there. The second run must not add it again, or it would be called
        twice.
Rule 2. In the second run the inputs are tensors of its own, so that a hook of theirs stays with
        them, as one of a tensor made inside does.
Rule 3. When the second run ends, hooks that it registered on tensors and modules go. Ended early,
        it cannot have removed them itself.

All of this is needed, and done, only where the first run registered a hook.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ckpt_wrap._torch_compat import has_hook_among, next_hook_number, remove_module_hooks

_REGISTER = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class OnlyOnce(TorchFunctionMode):
    """Context of a second run.

    Args:
        module: whose modules may get hooks.
        first: the numbers of the hooks the first run registered.
    """

    def __init__(self, module: nn.Module | None, first: range) -> None:
        super().__init__()
        self._module = module
        self._first = first
        self._start = 0
        self._made: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _REGISTER:
            return func(*args, **(kwargs or {}))
        if has_hook_among(args[0], self._first):  # Rule 1
            return RemovableHandle(OrderedDict())
        handle = func(*args, **(kwargs or {}))
        self._made.append(handle)
        return handle

    def __enter__(self) -> Any:
        self._start = next_hook_number()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._made:  # Rule 3
            handle.remove()
        if self._module is not None:
            remove_module_hooks(self._module, range(self._start, next_hook_number()))


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same values that no graph outside knows; a leaf if `tensor` is one."""
    if not tensor.requires_grad:
        return tensor
    new = tensor.detach()
    if type(new) is not type(tensor):
        new = new.as_subclass(type(tensor))
    new.requires_grad_()
    if tensor.grad_fn is not None and not tensor.is_nested:
        new = new.view_as(new)
    attributes = getattr(tensor, "__dict__", None)
    if attributes:
        new.__dict__.update(attributes)
    return new
