"""The name a nested wrapper adds to state-dict keys, and how to be rid of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

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
        # A module comes after its wrapper, so what is said of the module counts.
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


def add_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Give the keys under `prefix` the wrapper's part, unless they have it already."""
    nested = prefix + PREFIX
    for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(nested)]:
        state_dict[nested + key[len(prefix) :]] = state_dict.pop(key)
