"""Warn where checkpointing a module would save nothing, or recompute twice."""

from __future__ import annotations

import warnings

from torch import nn

from ckpt_wrap._where import describe, has_forward
from ckpt_wrap.modules._names import is_wrapper
from ckpt_wrap.modules._subclass import STATE

# Attributes by which transformers, diffusers, timm and others switch checkpointing on.
_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")


def warn_of_own_switch(module: nn.Module, function: str) -> None:
    """Warn if a module has switched its own checkpointing on.

    Warns:
        UserWarning: it would recompute twice.
    """
    for name, below in module.named_modules():
        switch = next((s for s in _SWITCHES if vars(below).get(s) is True), None)
        if switch is not None:
            warnings.warn(
                f"ckpt_wrap.{function}: module {describe(below, name)} has checkpointing of its "
                f"own switched on ({switch}=True), so it recomputes twice. Switch it off, for "
                "example by model.gradient_checkpointing_disable().",
                stacklevel=3,
            )
            return


def warn_of_one_region(module: nn.Module, function: str) -> None:
    """Warn if a module contains a list of repeated blocks, and becomes one region.

    A list itself, or one of two blocks, may be a segment on purpose. Blocks that are checkpointed
    themselves are fine: recomputation of the module saves only their inputs.

    Warns:
        UserWarning: recomputation holds the tensors of all blocks at once.
    """
    for name, below in module.named_modules():
        if below is module or not isinstance(below, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(block) for block in below if _is_plain_block(block)]
        repeated = next((kind for kind in kinds if kinds.count(kind) > 2), None)
        if repeated is not None and "expert" not in name:
            warnings.warn(
                f"ckpt_wrap.{function}: module {describe(module, '')} contains "
                f"{kinds.count(repeated)} {repeated.__name__} in {name!r} and becomes one region. "
                "Recomputation then holds the tensors of all of them at once, and the peak is not "
                "lower. Checkpoint the blocks: ckpt_wrap.checkpoint_layers_(model).",
                stacklevel=3,
            )
            return


def _is_plain_block(module: nn.Module) -> bool:
    """Whether a module has a forward and submodules, and is not checkpointed itself."""
    if not has_forward(module) or not any(True for _ in module.children()):
        return False
    return STATE not in vars(module) and not is_wrapper(module)
