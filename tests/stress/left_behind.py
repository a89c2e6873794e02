"""Process state that an interrupted operation could leave changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

_STACKS = ("_len_torch_dispatch_stack", "_len_torch_function_stack")


def state() -> dict[str, Any]:
    """Return everything to compare, by name."""
    hooks = [name for name in vars(of_all_modules) if name.startswith("_global_")]
    found: dict[str, Any] = {
        "nn.Module.__call__": nn.Module.__call__,
        "gradients enabled": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "saved-tensor hooks": _saved_tensor_hooks(),
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
    }
    for name in hooks:
        value = getattr(of_all_modules, name)
        found[f"hooks in {name}"] = len(value) if isinstance(value, dict) else value
    for name in _STACKS:
        count: Callable[[], int] | None = getattr(torch._C, name, None)
        found[name] = count() if count is not None else None
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describe the differences; "" if there are none."""
    return "; ".join(
        f"{name} {before[name]} became {after[name]}"
        for name in before
        if before[name] != after[name]
    )


def _saved_tensor_hooks() -> object:
    """Return the hooks that new saved tensors would get."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(True) if top is not None else None
