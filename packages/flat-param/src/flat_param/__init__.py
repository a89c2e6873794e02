"""Parameters as one flat tensor, in one process or sharded over many on torch.distributed.

This package places a module's parameters in one buffer per dtype and trainability, in place:

    flat = flatten(module)
    optimizer = torch.optim.AdamW(flat.chunks(), fused=True)

It defines no optimizers, collectives or model code.
"""

from ._errors import (
    CheckpointError,
    CommError,
    FlatParamError,
    LayoutError,
    ParameterError,
    StateError,
    VectorError,
)
from ._planner import plan_training, unit_shapes
from ._training_plan import RankBytes, StateElsewhere, TrainingPlan, UnitShape
from .checkpoint._load import load_sharded
from .checkpoint._save import async_save_sharded, save_sharded
from .checkpoint._state_dict import (
    full_state_dict,
    load_full_state_dict,
    optimizer_state_by_position,
)
from .comm._comm import CommCount
from .drop_in._flat_parameter import (
    FlatParameter,
    FlatParamShardMetadata,
    HandleShardingStrategy,
    ParamInfo,
    SharedParamInfo,
)
from .drop_in._handle import FlatParamHandle
from .in_process._flat_params import FlatParams
from .in_process._flatten import flat_params_of, flatten, unflatten
from .layout._boundary import Blocks
from .layout._boundary_rules import by_class, by_name
from .layout._layout import FlatLayout, Segment, plan_layout, plan_segments
from .layout._shard import ShardPart, ShardPlan, parts_between, plan_shard
from .layout._spec import ParamSpec, collect_params
from .offload._optimizer import offload_optimizer
from .sharded._by_hand import UnshardHandle
from .sharded._sharded_module import ShardedModule
from .sharded._units import fully_shard

__all__ = [
    "Blocks",
    "CheckpointError",
    "CommCount",
    "CommError",
    "FlatLayout",
    "FlatParamError",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FlatParams",
    "HandleShardingStrategy",
    "LayoutError",
    "ParamInfo",
    "ParamSpec",
    "ParameterError",
    "RankBytes",
    "Segment",
    "ShardPart",
    "ShardPlan",
    "ShardedModule",
    "SharedParamInfo",
    "StateElsewhere",
    "StateError",
    "TrainingPlan",
    "UnitShape",
    "UnshardHandle",
    "VectorError",
    "async_save_sharded",
    "by_class",
    "by_name",
    "collect_params",
    "flat_params_of",
    "flatten",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "load_sharded",
    "offload_optimizer",
    "optimizer_state_by_position",
    "parts_between",
    "plan_layout",
    "plan_segments",
    "plan_shard",
    "plan_training",
    "save_sharded",
    "unflatten",
    "unit_shapes",
]

__version__ = "0.1.0"
