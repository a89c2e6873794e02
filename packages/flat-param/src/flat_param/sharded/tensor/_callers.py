"""Code of torch and of other libraries that gets another answer than user code.

It is recognised by the names of its modules and functions, where no hook of torch or of its library
serves. Code whose names have changed gets the answer of user code.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch


class Callers:
    """Functions that ask the same question.

    Args:
        who: their full names; `*` is any module or any function.
        through: prefixes of modules whose functions may be between them and this package.
    """

    def __init__(self, *who: str, through: tuple[str, ...] = ()) -> None:
        self.who, self.through = frozenset(who), through

    def frame(self) -> FrameType | None:
        """The frame of one of them, if it has called this package. None in compiled code."""
        frame: FrameType | None = None if torch.compiler.is_compiling() else sys._getframe(1)
        is_inside = True
        while frame is not None:
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            is_inside = is_inside and module.startswith("flat_param.")
            if not is_inside:
                if not self.who.isdisjoint((f"{module}.{name}", f"{module}.*", f"*.{name}")):
                    return frame
                # Code of torch.distributed that asks for a state dict runs on all ranks.
                if not module.startswith(self.through) or module.startswith("torch.distributed"):
                    return None
            frame = frame.f_back
        return None


# Read shapes, to compute bounds or to compare them with whole tensors. `__torch_function__` has
# no caller, and other readers of shapes mean the local elements.
INITIALISERS = Callers(
    "torch.nn.init.*",
    "torch.distributed.checkpoint.default_planner.create_default_local_load_plan",
    "*.reset_parameters",
    "*._reset_parameters",
    "*.init_weights",
    "*._init_weights",
    "*.init_params",
    "*.weights_init",
    "*.init_parameters",
    "*._init_parameters",
    "*.initialize_weights",
    "*._initialize_weights",
    "*.initialize_parameters",
    "*._initialize_parameters",
)

# Take a parameter. Some make their state at construction, so their state dicts are followed.
# Hooks for steps and state dicts exist, none for construction.
OPTIMIZERS = Callers("torch.optim.optimizer.add_param_group")

# Send elements, which are others on each rank. Collectives have no `__torch_function__`.
COLLECTIVES = Callers("torch.distributed.distributed_c10d.*", "torch.distributed.utils.*")

# Write the memory of a tensor to a file, with its shape. Others read that memory, too.
FILES = Callers("safetensors.torch.*", through=("torch.",))

# Unshard a stage. A schedule that splits backwards is refused before anything is sent. Later
# calls come on the ranks of some stages only, and name no schedule.
PIPELINES = Callers("torch.distributed.pipelining.schedules.*")

# Take a model for sharded only if a parameter is a DTensor. `isinstance` reads only the class.
LOOKING_FOR_DTENSORS = Callers(
    "lightning.fabric.strategies.model_parallel.*",
    "lightning_fabric.strategies.model_parallel.*",
)

# Write, on one rank, the elements that a state dict has. Users save shards in the same way, on
# every rank.
SAVERS = Callers(
    "accelerate.checkpointing.save_accelerator_state",
    "accelerate.accelerator.save_state",
    "accelerate.accelerator.get_state_dict",
    "transformers.modeling_utils.save_pretrained",
    "peft.peft_model.save_pretrained",
    through=("torch.", "accelerate.", "transformers.", "peft."),
)
