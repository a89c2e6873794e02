"""A batch for stacks of blocks, training gradients, peaks, and replaced forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sac_policies.budget._measure import Marks, highest

ROWS = torch.linspace(-1, 1, 1024 * 8).view(1024, 8)


TARGET = torch.arange(1024) % 3


def training(model: nn.Module, **given: Any) -> list[torch.Tensor]:
    """Gradients and buffers of two steps."""
    found = []
    for step in range(2):
        torch.manual_seed(step)
        model.zero_grad()
        out = model(**{"x": ROWS, **given})
        (out["loss"] if "loss" in out else out["scores"].square().sum()).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [b.clone() for b in model.buffers()]
    return found


def own_forwards(model: nn.Module) -> list[str]:
    """Modules whose instances have a `forward` attribute."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


BATCH = {"x": ROWS, "target": TARGET}


def peak_growth(step: Callable[[], object], *, device: torch.device) -> int:
    """Bytes by which a step's peak exceeds the allocations before it."""
    return highest(Marks(device).intervals(step))
