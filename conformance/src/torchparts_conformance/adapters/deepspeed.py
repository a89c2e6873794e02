"""The adapter of DeepSpeed's activation checkpointing, a function around a call of a module.

People write `deepspeed.checkpointing.checkpoint(layer, x)` in a forward, or give this function to a
pipeline. So the wrapper here is the shortest that can be written around it: the module itself, of
which each call is such a call. What is asked of wrappers as modules it does not have: names and
states of a wrapper, copies of it, options, anything applied to a model, offloading without an
accelerator. DeepSpeed is not configured, which is how it is used where nothing is partitioned.
"""

from __future__ import annotations

import types
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from torchparts_conformance import Implementation

_module: Any = import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
_NO_WRAPPER = "DeepSpeed checkpoints a call, and has no module around a module"
_OF_MODULES = (
    *("CW-001", "CW-002", "CW-008", "CW-009", "CW-010", "CW-019", "CW-020", "CW-021", "CW-022"),
    *("CW-023", "CW-024", "CW-025", "CW-026", "CW-027", "CW-028", "CW-029", "CW-030", "CW-031"),
    *("CW-049", "CW-050", "CW-051", "CW-053"),
)


def _checkpoint_wrapper(module: nn.Module) -> nn.Module:
    forward = module.forward
    module.forward = lambda *args, **kwargs: _module.checkpoint(forward, *args, **kwargs)
    return module


def implementation() -> Implementation:
    """Adapt the installed DeepSpeed."""
    return Implementation(
        name="DeepSpeed",
        version=version("deepspeed"),
        distributions=("deepspeed",),
        parts={"ckpt-wrap": types.SimpleNamespace(checkpoint_wrapper=_checkpoint_wrapper)},
        lacks={"ckpt-wrap": dict.fromkeys(_OF_MODULES, _NO_WRAPPER)},
    )
