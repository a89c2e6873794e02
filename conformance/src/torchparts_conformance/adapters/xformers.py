"""Edge: the adapter of xformers, which has selective checkpointing under names of its own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torchparts_conformance import Implementation


def _context_fn(policy: Any) -> Callable[[], Any]:
    module = import_module("xformers.checkpoint")
    return functools.partial(module.selective_checkpoint_context_fn, policy)


def _checkpoint(function: Callable[..., Any], *args: Any, policy: Any = None, **kwargs: Any) -> Any:
    module = import_module("xformers.checkpoint")
    kwargs.pop("use_reentrant", None)  # xformers sets it by itself
    # An empty list saves nothing; xformers takes None for its own default list.
    return module.checkpoint(function, *args, policy_fn=[] if policy is None else policy, **kwargs)


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
