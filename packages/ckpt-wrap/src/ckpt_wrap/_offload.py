"""Torch: offloaded calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_wrap._offload_options import OffloadOptions


class Offload:
    """Calls a function and keeps what it saves elsewhere."""

    def __init__(self, options: OffloadOptions) -> None:
        self.options = options

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`; tensors on the CPU stay where they are."""
        return function(*args, **kwargs)
