"""Graph capture of an accelerator, during which the host may not wait."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._errors import EngineError

_KEEPS_PINNED_MEMORY = torch.__version__ >= "2.13"  # a TorchVersion, which compares as one


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured. `device` gives the device type."""
    ask = _asks(device.type)
    return ask is not None and ask()


@functools.cache
def _asks(kind: str) -> Callable[[], bool] | None:
    if kind in ("cpu", "meta"):
        return None
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)


def refuse_old_torch(is_captured: bool) -> None:
    """Raise if host memory of a captured copy would be reused later.

    Raises:
        EngineError: before torch 2.13, which reserves pinned memory for a graph.
    """
    if is_captured and not _KEEPS_PINNED_MEMORY:
        raise EngineError(
            "sac_policies.checkpoint: a policy offloads while a graph is being captured, but "
            "pinned memory is a graph's own only from torch 2.13 on, and this is "
            f"{torch.__version__}. Update torch, or capture a policy that keeps or recomputes."
        )
