"""The adapter of torch-remat, which selects regions of source code instead of operators.

It has no policy over operators and no `context_fn`, and documents two limits: it does not preserve
torch's random state, and a region returns tensors or one tuple or list of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torchparts_conformance import Implementation

_NO_POLICIES = "torch-remat decides by regions of source code, not by operators"
_module: Any = import_module("torch_remat")


def _checkpoint(function: Callable[..., Any], *args: Any, policy: Any = None, **kwargs: Any) -> Any:
    for option in ("use_reentrant", "preserve_rng_state"):  # it has one implementation only
        kwargs.pop(option, None)
    return _module.checkpoint(region_name="case")(function)(*args, **kwargs)


def implementation() -> Implementation:
    """Adapt the installed torch-remat."""
    return Implementation(
        name="torch-remat",
        version=version("torch-remat"),
        distributions=("torch-remat",),
        parts={"sac-policies": types.SimpleNamespace(checkpoint=_checkpoint)},
        lacks={
            "sac-policies": {
                # In the last two modules the policy is used by compiled code only.
                **dict.fromkeys(("policy", "SP-027", "SP-028"), _NO_POLICIES),
                "SP-008": "it does not preserve torch's random state",
                "SP-025": "a region returns tensors, or one tuple or list of them",
            }
        },
    )
