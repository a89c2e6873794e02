"""Parameters as one flat tensor, in one process or sharded over many on torch.distributed.

This package places a module's parameters in one buffer per dtype and trainability, in place:

    flat = flatten(module)
    optimizer = torch.optim.AdamW(flat.chunks(), fused=True)

It defines no optimizers, collectives or model code.
"""

from . import handle as handle
from . import plan as plan
from ._errors import (
    CheckpointError,
    CommError,
    FlatParamError,
    LayoutError,
    ParameterError,
    StateError,
    VectorError,
)
from ._offload_optimizer import offload_optimizer
from .checkpoint._load import load_sharded
from .checkpoint._save import async_save_sharded, save_sharded
from .checkpoint._state_dict import full_state_dict, load_full_state_dict
from .in_process._flat_params import FlatParams
from .in_process._flatten import flat_params_of, flatten, unflatten
from .layout._boundary import Blocks, by_name
from .sharded._sharded_module import ShardedModule
from .sharded.construct._units import fully_shard

__all__ = [
    "Blocks",
    "CheckpointError",
    "CommError",
    "FlatParamError",
    "FlatParams",
    "LayoutError",
    "ParameterError",
    "ShardedModule",
    "StateError",
    "VectorError",
    "async_save_sharded",
    "by_name",
    "flat_params_of",
    "flatten",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "load_sharded",
    "offload_optimizer",
    "save_sharded",
    "unflatten",
]

__version__ = "0.1.0"
