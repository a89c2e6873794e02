"""Activation checkpointing and offload, per module, leaving the model exactly as it was.

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
from ckpt_wrap._offload_report import offload_stats
from ckpt_wrap._phase import is_checkpointing, is_recomputing
from ckpt_wrap.checkpointing._options import CheckpointImpl
from ckpt_wrap.modules._in_place import checkpoint_, offload_, unwrap
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
    from ckpt_wrap._layers import LayerList, Layers, checkpoint_layers_
    from ckpt_wrap._plan import Plan, Step, make_plan
    from ckpt_wrap._policies import (
        ModuleInfo,
        Policy,
        by_class,
        by_function,
        by_name,
        by_size,
        every_nth,
    )

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "CkptWrapError",
    "LayerList",
    "Layers",
    "ModuleError",
    "ModuleInfo",
    "OffloadError",
    "OffloadOptions",
    "OffloadStats",
    "OffloadWrapper",
    "OptionError",
    "Plan",
    "Policy",
    "PolicyError",
    "RecomputeError",
    "Step",
    "apply_activation_checkpointing",
    "by_class",
    "by_function",
    "by_name",
    "by_size",
    "checkpoint_",
    "checkpoint_layers_",
    "checkpoint_wrapper",
    "clean_name",
    "clean_state_dict",
    "every_nth",
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

_PLANNED = {"Plan": "_plan", "Step": "_plan", "make_plan": "_plan"}
_PLANNED |= dict.fromkeys(("LayerList", "Layers", "checkpoint_layers_"), "_layers")
_PLANNED["apply_activation_checkpointing"] = "_apply"


def __getattr__(name: str) -> Any:
    """Load plans and policies when one is first asked for: who wraps by hand needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_PLANNED.get(name, '_policies')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
