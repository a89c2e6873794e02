"""Rebuilds pickled shards of state dicts; imported with the package, as torch.load may need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rebuild_shard(local: Tensor, *extent: Any) -> Tensor:
    """A `StoredShard` of these elements; `torch.load(weights_only=True)` may call this."""
    from ._flat_shard import Extent, StoredShard

    return StoredShard(local, Extent(*extent))


torch.serialization.add_safe_globals([rebuild_shard])
