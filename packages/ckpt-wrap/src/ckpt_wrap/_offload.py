"""Torch: offloaded calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """How saved tensors are offloaded."""

    min_bytes: int = 1024


class Offload:
    """Calls a function and keeps what it saves elsewhere."""

    def __init__(self, options: OffloadOptions) -> None:
        self.options = options

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`; tensors on the CPU stay where they are."""
        return function(*args, **kwargs)
