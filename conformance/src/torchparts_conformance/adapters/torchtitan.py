"""The adapter of torchtitan's `FullAC`, which checkpoints each block of a model.

It is applied to a model with blocks in `layers`. So the adapter makes a model with the module as
its only block and returns the block's replacement as the wrapper. `SelectiveAC` has a fixed list
that recomputes every second product, and `MemoryBudgetAC` sets torch's budget: neither accepts a
policy. Reentrant checkpointing, contexts, rules and offloading are not provided.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from torchparts_conformance import Implementation
from torchparts_conformance.adapters import inside_torch

_module: Any = import_module("torchtitan.distributed.activation_checkpoint")


_Impl = inside_torch.CheckpointImpl
_OF_TORCH = "FullAC uses torch's own wrapper, which is judged with torch"
_OF_WRAPPERS = (
    *("CW-001", "CW-002", "CW-008", "CW-009", "CW-010"),
    *("CW-019", "CW-020", "CW-021", "CW-022", "CW-053"),
)


class _Impls:
    """Names of the two implementations, of which only one is provided."""

    NO_REENTRANT = _Impl.NO_REENTRANT
    REENTRANT = _Impl.REENTRANT

    def __iter__(self) -> Iterator[Any]:
        return iter((self.NO_REENTRANT,))


def _checkpoint_wrapper(module: nn.Module, checkpoint_impl: Any = _Impl.NO_REENTRANT) -> nn.Module:
    layers = nn.ModuleDict({"0": module})
    _module.FullAC(_module.FullAC.Config()).apply(nn.ModuleDict({"layers": layers}))
    return layers["0"]


def implementation() -> Implementation:
    """Adapt the installed torchtitan."""
    part = types.SimpleNamespace(checkpoint_wrapper=_checkpoint_wrapper, CheckpointImpl=_Impls())
    return Implementation(
        name="torchtitan",
        version=version("torchtitan"),
        distributions=("torchtitan",),
        parts={"ckpt-wrap": part},
        lacks={
            "ckpt-wrap": {
                **dict.fromkeys(_OF_WRAPPERS, _OF_TORCH),
                "CW-004": "torchtitan has no reentrant checkpointing",
            }
        },
    )
