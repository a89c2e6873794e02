"""The kinds of devices this machine has, asked of torch, with no list of them here."""

from __future__ import annotations

import importlib.metadata
from typing import Any


def accelerator() -> str | None:
    """Give the kind of accelerator that torch finds on this machine, such as "cuda"."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)


def is_known(kind: str) -> bool:
    """Say whether torch has such a kind of device, or an installed back end brings it."""
    import torch

    try:
        torch.device(kind)
    except RuntimeError:
        return any(entry.name == kind for entry in _back_ends())
    return True


def is_there(kind: str) -> bool:
    """Say whether tensors can be put on a device of this kind.

    A process that was kept from it has torch's back ends of other distributions imported here.
    """
    if kind == "cpu" or accelerator() == kind:
        return True
    import torch

    try:
        torch.device(kind)
        return False  # torch knows the word, and finds no such device
    except RuntimeError:
        import_back_ends()
    return accelerator() == kind


def name_of(kind: str | None) -> str | None:
    """Give what the maker calls a device of this kind, where its module says."""
    if kind is None:
        return None
    import torch

    module: Any = torch.get_device_module(kind)
    name = getattr(module, "get_device_name", None)
    return kind if name is None else str(name())


def import_back_ends() -> None:
    """Import torch's back ends of other distributions, as torch does in a process of the user's.

    Only what is imported before autograd has run anything gets backward threads.
    """
    for entry in _back_ends():
        entry.load()()


def _back_ends() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group="torch.backends")
