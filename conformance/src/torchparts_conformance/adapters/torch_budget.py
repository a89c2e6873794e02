"""The adapter of `activation_memory_budget`, by which torch.compile checkpoints what it compiles.

It is a setting of the compiler and no call around a region, so a module is compiled by itself here,
and the budget is set while it is called, which is when it is compiled. The budget is 0, of which
torch says that it is checkpointing applied to the whole of what is compiled. The backend is
`aot_eager`: the budget's partition of forward and backward, and torch's own kernels, so that
gradients have plain's bits where the budget changes nothing. Compiled code is not run again as
Python is: what counts the runs of a forward is not asked, nor are policies, plans and wrappers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

from torchparts_conformance import Implementation, NotProvided
from torchparts_conformance.adapters import inside_torch

_functorch: Any = import_module("torch._functorch.config")
_dynamo: Any = import_module("torch._dynamo.config")
_Impl = inside_torch.CheckpointImpl
_NO_WRAPPER = "the budget is of what is compiled, and no module stands around a module"
_NO_PYTHON = "compiled code runs operators again, and no forward whose runs could be counted"
_OF_WRAPPERS = (
    *("CW-001", "CW-002", "CW-008", "CW-009", "CW-010", "CW-019", "CW-020", "CW-021", "CW-022"),
    *("CW-023", "CW-024", "CW-025", "CW-026", "CW-027", "CW-028", "CW-029", "CW-030", "CW-031"),
    *("CW-032", "CW-049", "CW-051", "CW-053"),
)
# Each module here is one more kind for the same code; none of them is to run uncompiled.
_ALL_COMPILED = {"recompile_limit": 1000, "fail_on_recompile_limit_hit": True}


class _Impls:
    """The words for the two implementations, of which only one is there."""

    NO_REENTRANT = _Impl.NO_REENTRANT
    REENTRANT = _Impl.REENTRANT

    def __iter__(self) -> Iterator[Any]:
        return iter((self.NO_REENTRANT,))


def within(function: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Compile a function with a budget: 0 is all again, 1 what the compiler does by itself."""
    compiled = torch.compile(function, backend="aot_eager")

    def call(*args: Any, **kwargs: Any) -> Any:
        budgeted = _functorch.patch(activation_memory_budget=budget)
        with budgeted, _dynamo.patch(**_ALL_COMPILED):
            return compiled(*args, **kwargs)

    return call


def _checkpoint_wrapper(module: nn.Module, checkpoint_impl: Any = _Impl.NO_REENTRANT) -> nn.Module:
    if checkpoint_impl is _Impl.REENTRANT:
        raise NotProvided("torch.compile checkpoints without reentrance only")
    module.forward = within(module.forward, 0.0)
    return module


def implementation() -> Implementation:
    """Adapt the compiler of the installed torch."""
    part = types.SimpleNamespace(checkpoint_wrapper=_checkpoint_wrapper, CheckpointImpl=_Impls())
    return Implementation(
        name="torch activation_memory_budget",
        version=torch.__version__,
        distributions=("torch",),
        parts={"ckpt-wrap": part},
        lacks={
            "ckpt-wrap": {
                **dict.fromkeys(_OF_WRAPPERS, _NO_WRAPPER),
                **dict.fromkeys(("CW-018", "CW-054", "CW-097"), _NO_PYTHON),
                "CW-108": "torch.compile takes no number that has attributes, budget or not",
            }
        },
    )
