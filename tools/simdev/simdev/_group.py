"""The backend "simccl": process groups with collectives on streams of the simulated device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

BACKEND = "simccl"


def register_group(extension: Any) -> None:
    """Register the backend for `init_process_group("simccl")`, if torch has process groups."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        carrier = dist.ProcessGroupGloo(store, rank, size, timeout)  # as collectives.h explains
        return extension.make_group(carrier, rank, size)

    dist.Backend.register_backend(BACKEND, make, devices=["simdev"])
