"""Graph captures of an accelerator, during which the host must not wait for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._errors import StateError


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the device's type is being captured."""
    ask = _asks(device.type)
    return ask is not None and ask()


@functools.cache
def _asks(kind: str) -> Callable[[], bool] | None:
    if kind in ("cpu", "meta"):
        return None
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)


def refuse_capture(name: str, device: torch.device) -> None:
    """Raise an error during capture of a unit whose gradients are copied to the host."""
    if is_capturing(device):
        raise StateError(
            f"flat_param.fully_shard: unit '{name}' has an offload_policy and a graph is being "
            "captured, but gradients cannot be moved to the host during a capture. Capture "
            "without offload_policy, or run this module outside of the capture."
        )
