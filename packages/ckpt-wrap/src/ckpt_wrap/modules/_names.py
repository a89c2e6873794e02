"""The name of a wrapped module, in attribute paths and in state dicts of torch's wrapper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from ckpt_wrap._torch_compat import edges

WRAPPED_MODULE = "_checkpoint_wrapped_module"
PREFIX = WRAPPED_MODULE + "."

T = TypeVar("T")


def clean_name(name: str) -> str:
    """A parameter or module name without the wrapper's prefix.

    Example:
        >>> clean_name("layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != WRAPPED_MODULE)


def clean_state_dict(state_dict: Mapping[str, T]) -> dict[str, T]:
    """A state dict that a model without wrappers can load; values are the same objects.

    Module versions are kept.

    Example:
        >>> dict(clean_state_dict({"0._checkpoint_wrapped_module.weight": 1}))
        {'0.weight': 1}
    """
    clean: Any = OrderedDict((clean_name(name), value) for name, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # A module comes after its wrapper, so the version of the module is kept.
        clean._metadata = {clean_name(name): value for name, value in metadata.items()}
    cleaned: dict[str, T] = clean
    return cleaned


def clean_in_place(state_dict: dict[str, Any]) -> None:
    """Rename the keys that carry the prefix, keeping the order of all keys."""
    if not any(PREFIX in key for key in state_dict):
        return
    items = [(clean_name(key), value) for key, value in state_dict.items()]
    state_dict.clear()
    state_dict.update(items)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper, this package's or torch's own."""
    return any(name == WRAPPED_MODULE for name, _ in edges(module))


def innermost(module: nn.Module) -> nn.Module:
    """The module within all wrappers around it."""
    while is_wrapper(module):
        module = module.get_submodule(WRAPPED_MODULE)
    return module
