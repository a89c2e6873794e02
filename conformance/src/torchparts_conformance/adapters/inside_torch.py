"""The adapter of torch's own implementation, which is private and may move.

No other file of the suite uses torch's private modules.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from torchparts_conformance import Implementation


def _context_fn(policy: Any) -> Callable[[], Any]:
    """Make a `context_fn` from a policy function or a list of operators to save."""
    return functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)


def _checkpoint(function: Callable[..., Any], *args: Any, policy: Any = None, **kwargs: Any) -> Any:
    if policy is not None:
        kwargs["context_fn"] = _context_fn(policy)
    kwargs.setdefault("use_reentrant", False)
    return torch_checkpoint.checkpoint(function, *args, **kwargs)


def __getattr__(name: str) -> Any:
    """Import on first use what is slow to import: `flat_param` and `MemTracker`."""
    if name in ("CheckpointImpl", "CheckpointWrapper"):
        wrappers = import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
        return getattr(wrappers, name)
    if name == "MemTracker":
        return import_module("torch.distributed._tools.mem_tracker").MemTracker
    if name != "flat_param":
        raise AttributeError(name)
    module = import_module("torch.distributed.fsdp._flat_param")
    fsdp = import_module("torch.distributed.fsdp")
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return types.SimpleNamespace(
        **{**names, "FullyShardedDataParallel": fsdp.FullyShardedDataParallel}
    )


def implementation() -> Implementation:
    """Adapt the modules of the installed torch."""
    return Implementation(
        name="torch",
        version=torch.__version__,
        distributions=("torch",),
        parts={
            "ckpt-wrap": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
            "mod-tracker": "torch.distributed._tools.mod_tracker",
            "flat-param": "torchparts_conformance.adapters.inside_torch:flat_param",
            "sac-policies": types.SimpleNamespace(checkpoint=_checkpoint, context_fn=_context_fn),
        },
        capabilities={"ckpt-wrap": frozenset({"compile"})},
    )
