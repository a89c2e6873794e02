"""Kinds of devices on this machine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any


def accelerator() -> str | None:
    """Return the kind of this machine's accelerator, such as "cuda"."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)


def is_known(kind: str) -> bool:
    """Return whether torch, or an installed backend, knows this kind of device."""
    import torch

    try:
        torch.device(kind)
    except RuntimeError:
        back_ends = importlib.metadata.entry_points(group="torch.backends")
        return any(entry.name == kind for entry in back_ends)
    return True


def is_there(kind: str) -> bool:
    """Return whether this machine has a device of this kind."""
    return kind == "cpu" or accelerator() == kind


def environment() -> dict[str, Any]:
    """Return Python, torch and devices of a run, without anything that identifies the machine."""
    import torch

    kind = accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    name = getattr(module, "get_device_name", lambda: kind)
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "card": None if kind is None else str(name()),
    }
