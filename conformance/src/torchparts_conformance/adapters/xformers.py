"""The adapter of xformers, which has selective checkpointing under names of its own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torchparts_conformance import Implementation

_module: Any = import_module("xformers.checkpoint")


def _context_fn(policy: Any) -> Callable[[], Any]:
    return functools.partial(_module.selective_checkpoint_context_fn, policy)


def _checkpoint(function: Callable[..., Any], *args: Any, policy: Any = None, **kwargs: Any) -> Any:
    kwargs.pop("use_reentrant", None)  # xformers sets it by itself
    # An empty list saves nothing; xformers takes None for its own default list.
    return _module.checkpoint(function, *args, policy_fn=[] if policy is None else policy, **kwargs)


def implementation() -> Implementation:
    """Adapt the installed xformers."""
    return Implementation(
        name="xformers",
        version=version("xformers"),
        distributions=("xformers",),
        parts={
            "sac-policies": types.SimpleNamespace(checkpoint=_checkpoint, context_fn=_context_fn)
        },
    )
