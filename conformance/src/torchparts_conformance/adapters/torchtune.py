"""The adapter of torchtune's activation offloading, a context manager around a forward.

torchtune wraps no modules, so the adapter uses a minimal wrapper. The context manager creates an
accelerator stream even if all tensors are on the CPU.
"""

from __future__ import annotations

import types
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from torchparts_conformance import Implementation

_ON_THE_CPU = {"offload_wrapper": "OffloadActivations needs an accelerator"}
_module: Any = import_module("torchtune.training._activation_offloading")


class _Offloaded(nn.Module):
    """A module whose forward runs inside torchtune's context manager."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _module.OffloadActivations(use_pin_memory=False, use_streams=False):
            return self._checkpoint_wrapped_module(*args, **kwargs)


def implementation() -> Implementation:
    """Adapt the installed torchtune."""
    return Implementation(
        name="torchtune",
        version=version("torchtune"),
        distributions=("torchtune",),
        parts={"ckpt-wrap": types.SimpleNamespace(offload_wrapper=_Offloaded)},
        lacks={} if torch.accelerator.is_available() else {"ckpt-wrap": _ON_THE_CPU},
    )
