"""Finds tensor subclasses that wrap other tensors, such as DTensor and torchao's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .._tensors import tensors_in
from ..policies._modules import root_of

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_modules: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], ...]] = (
    weakref.WeakKeyDictionary()
)
"""The modules below a module that have parameters. They are listed once: a walk takes long."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others. Nested tensors do, too, and have rules of their own."""
    kind = type(tensor)
    return kind not in _PLAIN and hasattr(kind, "__tensor_flatten__") and not tensor.is_nested


def reads_wrappers(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is given such tensors, or is a module that has them as parameters."""
    is_plain = not kwargs and _PLAIN.issuperset(map(type, args))
    if not is_plain and any(map(is_wrapper, tensors_in((args, kwargs)))):
        return True
    root = root_of(function)
    return root is not None and _has_wrappers(root)


def _has_wrappers(root: nn.Module) -> bool:
    known = _modules.get(root)
    if known is None:
        known = tuple(weakref.ref(each) for each in root.modules() if each._parameters)
        _modules[root] = known
    for reference in known:
        module = reference()
        if module is None:
            continue
        for parameter in module._parameters.values():
            if type(parameter) not in _PLAIN and parameter is not None and is_wrapper(parameter):
                return True
    return False
