"""The adapter of DeepSpeed's activation checkpointing, which wraps one call of a module.

Users write `deepspeed.checkpointing.checkpoint(layer, x)` in a forward, or pass one of its two
functions to a pipeline. The wrapper here is the module itself, whose calls go through
`non_reentrant_checkpoint` or `checkpoint`, depending on `checkpoint_impl`. DeepSpeed has no wrapper
modules, so names, state dicts, copies, options, applying to a model, and offloading without an
accelerator are not provided. DeepSpeed is not configured, as is usual without partitioning.
"""

from __future__ import annotations

import types
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from torchparts_conformance import Implementation
from torchparts_conformance.adapters import inside_torch

_module: Any = import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
_Impl = inside_torch.CheckpointImpl
_NO_WRAPPER = "DeepSpeed checkpoints calls and has no wrapper module"
_NO_KEYWORDS = "non_reentrant_checkpoint takes no keyword arguments"
_OF_MODULES = (
    *("CW-001", "CW-002", "CW-008", "CW-009", "CW-010"),
    *("CW-019", "CW-020", "CW-021", "CW-022", "CW-053"),
)


def _checkpoint_wrapper(module: nn.Module, checkpoint_impl: Any = _Impl.NO_REENTRANT) -> nn.Module:
    reenters = checkpoint_impl is _Impl.REENTRANT
    forward = module.forward
    checkpoint = _module.checkpoint if reenters else _module.non_reentrant_checkpoint
    module.forward = lambda *args, **kwargs: checkpoint(forward, *args, **kwargs)
    return module


def implementation() -> Implementation:
    """Adapt the installed DeepSpeed."""
    part = types.SimpleNamespace(checkpoint_wrapper=_checkpoint_wrapper, CheckpointImpl=_Impl)
    return Implementation(
        name="DeepSpeed",
        version=version("deepspeed"),
        distributions=("deepspeed",),
        parts={"ckpt-wrap": part},
        lacks={
            "ckpt-wrap": {
                **dict.fromkeys(_OF_MODULES, _NO_WRAPPER),
                **dict.fromkeys(("CW-003", "CW-037", "CW-038"), _NO_KEYWORDS),
            }
        },
    )
