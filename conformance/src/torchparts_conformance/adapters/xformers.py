"""The adapter of xformers, whose selective checkpointing has the same concepts under other names.

xformers uses private classes of `torch.utils.checkpoint`, so each release supports one torch. Its
metadata does not say which; its build information does.
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
    kwargs.pop("use_reentrant", None)  # xformers passes it itself
    # An empty list saves nothing; None would mean xformers' default list.
    return _module.checkpoint(function, *args, policy_fn=[] if policy is None else policy, **kwargs)


def _torch_it_was_built_for() -> str:
    """Return the torch versions, of one minor, that the installed wheel was built for."""
    facts = Path(_module.__file__).with_name("cpp_lib.json")
    if not facts.is_file():  # built from source, for the installed torch
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
