"""Activation checkpointing and offload, per module, with the names of the plain model.

Example:
    >>> import torch
    >>> from ckpt_wrap import checkpoint_wrapper
    >>> block = checkpoint_wrapper(torch.nn.Linear(4, 4))
    >>> block(torch.ones(1, 4)).sum().backward()
"""

from ckpt_wrap._ambient import is_recomputing
from ckpt_wrap._apply import apply_activation_checkpointing
from ckpt_wrap._errors import (
    CkptWrapError,
    ModuleError,
    OffloadError,
    OptionError,
    PolicyError,
    RecomputeError,
)
from ckpt_wrap._in_place import checkpoint_, offload_, offload_stats, unwrap
from ckpt_wrap._layers import checkpoint_layers_
from ckpt_wrap._offloaded_storage import OffloadStats
from ckpt_wrap._options import CheckpointImpl
from ckpt_wrap._wrapper import (
    PREFIX,
    WRAPPED_MODULE,
    ActivationWrapper,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    clean_state_dict,
    offload_wrapper,
)

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "CkptWrapError",
    "ModuleError",
    "OffloadError",
    "OffloadStats",
    "OffloadWrapper",
    "OptionError",
    "PolicyError",
    "RecomputeError",
    "apply_activation_checkpointing",
    "checkpoint_",
    "checkpoint_layers_",
    "checkpoint_wrapper",
    "clean_state_dict",
    "is_recomputing",
    "offload_",
    "offload_stats",
    "offload_wrapper",
    "unwrap",
]

# Names that other code imports from torch's module of wrappers.
_CHECKPOINT_PREFIX, _CHECKPOINT_WRAPPED_MODULE = PREFIX, WRAPPED_MODULE

__version__ = "0.1.0"
