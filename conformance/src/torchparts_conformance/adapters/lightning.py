"""The adapter of Lightning's activation checkpointing, an option of its `FSDPStrategy`.

`activation_checkpointing_policy` accepts a set of classes or a policy of torch. The strategy
applies it to a model that it has sharded. The adapter calls that step without the sharding. A rule
that is a function is passed as torch's `CustomPolicy`. Lightning does not wrap single modules, so
only applying to a model is judged; the wrapper cannot be chosen.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

from torchparts_conformance import Implementation
from torchparts_conformance.adapters import inside_torch

_strategies: Any = import_module("lightning.fabric.strategies.fsdp")
_ONE_MODULE = "Lightning applies checkpointing to a model and wraps no single module"
_OF_MODULES = (
    *("CW-001", "CW-002", "CW-003", "CW-004", "CW-005", "CW-006", "CW-007", "CW-008", "CW-009"),
    *(
        "CW-010",
        "CW-017",
        "CW-018",
        "CW-019",
        "CW-020",
        "CW-021",
        "CW-022",
        "CW-036",
        "CW-037",
        "CW-038",
    ),
    *("CW-046", "CW-053", "CW-094", "CW-095", "CW-096", "CW-100", "CW-110", "CW-111", "CW-120"),
)


def _apply(
    model: nn.Module,
    checkpoint_wrapper_fn: Any = None,
    *,
    check_fn: Callable[[nn.Module], bool] | None = None,
    auto_wrap_policy: Any = None,
) -> None:
    policy = CustomPolicy(check_fn) if check_fn is not None else auto_wrap_policy
    strategy = _strategies.FSDPStrategy(activation_checkpointing_policy=policy)
    _strategies._setup_activation_checkpointing(model, strategy._activation_checkpointing_kwargs)


def implementation() -> Implementation:
    """Adapt the installed Lightning."""
    part = types.SimpleNamespace(
        apply_activation_checkpointing=_apply,
        checkpoint_wrapper=None,  # what cases of applying pass on
        CheckpointWrapper=inside_torch.CheckpointWrapper,
        CheckpointImpl=inside_torch.CheckpointImpl,
    )
    return Implementation(
        name="Lightning",
        version=version("lightning"),
        distributions=("lightning",),
        parts={"ckpt-wrap": part},
        lacks={"ckpt-wrap": dict.fromkeys(_OF_MODULES, _ONE_MODULE)},
    )
