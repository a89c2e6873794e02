"""The adapter of xformers, which has selective checkpointing under names of its own.

It builds on private classes of `torch.utils.checkpoint`, so that a release is for one torch; which,
its metadata does not say, but what was written when it was built.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchparts_conformance import Implementation

_module: Any = import_module("xformers.checkpoint")


def _context_fn(policy: Any) -> Callable[[], Any]:
    return functools.partial(_module.selective_checkpoint_context_fn, policy)


def _checkpoint(function: Callable[..., Any], *args: Any, policy: Any = None, **kwargs: Any) -> Any:
    kwargs.pop("use_reentrant", None)  # xformers sets it by itself
    # An empty list saves nothing; xformers takes None for its own default list.
    return _module.checkpoint(function, *args, policy_fn=[] if policy is None else policy, **kwargs)


def _torch_it_was_built_for() -> str:
    """Give the versions of torch, of one minor, that the installed wheel was built for."""
    facts = Path(_module.__file__).with_name("cpp_lib.json")
    if not facts.is_file():  # built from source, for the torch that is here
        return ""
    built = json.loads(facts.read_text(encoding="utf-8"))["version"]["torch"]
    return f"=={'.'.join(built.split('.')[:2])}.*"


def implementation() -> Implementation:
    """Adapt the installed xformers."""
    return Implementation(
        name="xformers",
        version=version("xformers"),
        distributions=("xformers",),
        torch=_torch_it_was_built_for(),
        parts={
            "sac-policies": types.SimpleNamespace(checkpoint=_checkpoint, context_fn=_context_fn)
        },
    )
