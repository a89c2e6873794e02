"""Activation checkpointing and offload, per module, with the names of the plain model.

Example:
    >>> import torch
    >>> from ckpt_wrap import checkpoint_wrapper
    >>> block = checkpoint_wrapper(torch.nn.Linear(4, 4))
    >>> block(torch.ones(1, 4)).sum().backward()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_wrap._errors import (
    CkptWrapError,
    ModuleError,
    OffloadError,
    OptionError,
    PolicyError,
    RecomputeError,
)
from ckpt_wrap._phase import is_checkpointing, is_recomputing
from ckpt_wrap.checkpointing._options import CheckpointImpl
from ckpt_wrap.modules._in_place import checkpoint_, offload_, offload_stats, unwrap
from ckpt_wrap.modules._names import PREFIX, WRAPPED_MODULE, clean_name, clean_state_dict
from ckpt_wrap.modules._wrapper import (
    ActivationWrapper,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from ckpt_wrap.offload._offload_options import OffloadOptions
from ckpt_wrap.offload._offload_stats import OffloadStats

if TYPE_CHECKING:
    from ckpt_wrap._apply import apply_activation_checkpointing
    from ckpt_wrap._layers import checkpoint_layers_
    from ckpt_wrap._plan import Plan, Step, make_plan

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "CkptWrapError",
    "ModuleError",
    "OffloadError",
    "OffloadOptions",
    "OffloadStats",
    "OffloadWrapper",
    "OptionError",
    "Plan",
    "PolicyError",
    "RecomputeError",
    "Step",
    "apply_activation_checkpointing",
    "checkpoint_",
    "checkpoint_layers_",
    "checkpoint_wrapper",
    "clean_name",
    "clean_state_dict",
    "is_checkpointing",
    "is_recomputing",
    "make_plan",
    "offload_",
    "offload_stats",
    "offload_wrapper",
    "unwrap",
]

# What other code takes from torch's module of wrappers.
_CHECKPOINT_PREFIX, _CHECKPOINT_WRAPPED_MODULE = PREFIX, WRAPPED_MODULE

__version__ = "0.1.0"

_ON_DEMAND = {
    "Plan": "_plan",
    "Step": "_plan",
    "apply_activation_checkpointing": "_apply",
    "checkpoint_layers_": "_layers",
    "make_plan": "_plan",
}


def __getattr__(name: str) -> Any:
    """Import plans on demand: code that only calls `checkpoint_` needs none."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_ON_DEMAND[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
