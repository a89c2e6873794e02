"""What runs a region under torch and under this package, and what a forward leaves for backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from frontier_fits import Region
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sac_policies
from sac_policies import ATTENTION, CONVOLUTIONS, MATMULS

COSTLY = sac_policies.save_ops(MATMULS, ATTENTION, CONVOLUTIONS)
FULL: Region = functools.partial(checkpoint, use_reentrant=False)


def torchs_selective(kept: sac_policies.Policy) -> Region:
    """Run a region under torch's selective checkpointing, with the same operators kept."""
    keeps = functools.cache(lambda op: f"{kept.constant(op)}".endswith("SAVE"))

    def decide(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
        return save if keeps(op) else again

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def under(**settings: Any) -> Region:
    """Run a region under this package."""
    return functools.partial(sac_policies.checkpoint, **settings)


def kept_bytes(forward: Callable[[], torch.Tensor], device: torch.device) -> int:
    """What the allocator holds after a forward, its output included."""
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as p:
            out = forward()
        size = sum(event.self_cpu_memory_usage for event in p.key_averages())
    else:
        before = torch.accelerator.memory_allocated()
        out = forward()
        size = torch.accelerator.memory_allocated() - before
    del out
    return int(size)
