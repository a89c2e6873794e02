"""What `fit_` does with a stack of blocks, as regions that others can be compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sac_policies

Region = Callable[..., Any]
Stack = list[Region]
"""What runs each block, in order."""


def plainly(block: Region, *args: Any, **kwargs: Any) -> Any:
    """Run a block as it is."""
    return block(*args, **kwargs)


def at_the_peak_of(stack: Stack, blocks: nn.ModuleList, x: torch.Tensor) -> Stack:
    """What `fit_` does with the memory that another way takes at most."""
    model = nn.Sequential(*blocks)
    for block, region in zip(blocks, stack, strict=True):
        block.forward = functools.partial(region, block.forward)
    peak = sac_policies.fit_(model, x, "100%").peak_bytes
    for block in blocks:
        del block.forward
    return found_by(sac_policies.fit_(model, x, peak), blocks)


def divided(blocks: nn.ModuleList, x: torch.Tensor, budgets: tuple[float, ...]) -> dict[str, Stack]:
    """What `fit_` does with shares of the plain peak; nothing if one is too small."""
    model = nn.Sequential(*blocks)
    return {
        f"{budget:.0%}": found_by(sac_policies.fit_(model, x, budget), blocks) for budget in budgets
    }


def found_by(fitted: Any, blocks: nn.ModuleList) -> Stack:
    """Each block as `fit_` has it, which is then undone; nothing where it found nothing."""
    if not fitted:
        return []
    stack = [as_fitted(vars(block).get("forward")) for block in blocks]
    forwards = [vars(block).get("forward") for block in blocks]
    fitted.undo()
    for forward in forwards:
        if forward is not None:
            forward.is_undone = False  # here it goes on as a region, without its block
    return stack


def as_fitted(forward: Callable[[Any], Any] | None) -> Region:
    """Run a block by the forward that it was given, if any."""
    return plainly if forward is None else lambda _, x: forward(x)
