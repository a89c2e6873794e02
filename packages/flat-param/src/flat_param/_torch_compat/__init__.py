"""Every private torch name that this package uses.

A name that torch has lost raises an error, unless the function says what happens without it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import StateError

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with the hooks that its step calls."""

without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which functions ignore `__torch_function__` of subclasses."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing; torch's own subclasses, such as Parameter, have it."""


def _needed(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise StateError(
            f"flat_param.fully_shard: torch {torch.__version__} has no {name}, which sharding "
            "needs. Use torch 2.9 to 2.15."
        )
    return found


# Process groups and the end of a process.


def default_store() -> Any:
    """The store of the default process group, for keys of this package."""
    store = _needed(dist.distributed_c10d, "_get_default_store")()
    return _needed(dist, "PrefixStore")("flat_param", store)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's collectives; None if its backends do not tell it."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def drop_default_group_arguments() -> None:
    """Remove process groups from default arguments of torch's differentiable collectives.

    Only at the end of a process: torch evaluates the defaults once, when it imports the module.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        given = getattr(function, "__defaults__", None) or ()
        if any(isinstance(each, dist.ProcessGroup) for each in given):
            kept = (None if isinstance(each, dist.ProcessGroup) else each for each in given)
            function.__defaults__ = tuple(kept)


# Autograd.


will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward will execute a node."""


def backward_is_running() -> bool:
    """Whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback` at the end of the running backward."""
    _needed(torch.autograd.Variable, "_execution_engine").queue_callback(callback)


is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Whether autograd treats a tensor as a view of another."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""A number that changes with every in-place change of a tensor or of a view of it."""


def is_referenced(tensors: Sequence[Tensor], index: int, *, owns_storage: bool) -> bool:
    """Whether more than `tensors` refers to a tensor or, if it owns its storage, to that.

    Without the private name, views of it that have no reference to it are not found.
    """
    objects, storages = _references_of_one()
    if sys.getrefcount(tensors[index]) > objects:
        return True
    return owns_storage and _storage_users(tensors[index]) > storages


@cache
def _references_of_one() -> tuple[int, int]:
    alone = [torch.empty(1)]
    return sys.getrefcount(alone[0]), _storage_users(alone[0])


def _storage_users(tensor: Tensor) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(tensor.untyped_storage()._cdata))


grad_hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""The hooks of `register_hook`."""

post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None]
"""The hooks of `register_post_accumulate_grad_hook`, in order."""
post_accumulate_grad_hooks = attrgetter("_post_accumulate_grad_hooks")


# FSDP2's modules.


def fsdp_module_class() -> Any:
    """The class by which other libraries recognise modules of FSDP2."""
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def set_pipeline_state(module: Any, reduce: Callable[[], object]) -> None:
    """Have a pipeline's stage call `reduce` after the last microbatch, as it does with FSDP2.

    Only before torch 2.15, whose stages call `finalize_backward`, a public method.
    """
    from torch.distributed.fsdp import fully_shard

    try:
        from torch.distributed._composable.contract import STATE_KEY
    except ImportError:
        return
    of_units = SimpleNamespace(all_states=())  # the pipeline would reduce each of these
    state = SimpleNamespace(_state_ctx=of_units, _root_post_backward_final_callback=reduce)
    vars(module).setdefault(STATE_KEY, {})[inspect.unwrap(fully_shard)] = state


def splits_backward(schedule: Any) -> bool:
    """Whether a pipeline's schedule computes gradients of parameters apart from those of inputs."""
    orders = getattr(schedule, "pipeline_order_with_comms", None) or {}
    kinds = {action.computation_type.name for each in orders.values() for action in each if action}
    return "BACKWARD_WEIGHT" in kinds


# Tensor subclasses and state dicts.


def dtensor_spec(
    mesh: Any, placements: Any, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """The spec of a DTensor subclass that is no view of its elements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(size, stride, dtype))


def dtensor_offsets(size: torch.Size, mesh: Any, placements: Any) -> tuple[int, ...]:
    """The start of this rank's part of a DTensor along each dimension."""
    from torch.distributed.tensor import _utils

    found: tuple[int, ...] = _utils.compute_local_shape_and_global_offset(size, mesh, placements)[1]
    return tuple(found)


def make_wrapper(cls: Any, size: tuple[int, ...], stride: tuple[int, ...], local: Tensor) -> Any:
    """A tensor of a subclass without memory, of the dtype and device of `local`."""
    return Tensor._make_wrapper_subclass(
        cls, size, strides=stride, dtype=local.dtype, device=local.device
    )


def set_element(nested: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value at its path in nested dicts and lists, as torch's checkpoints name paths."""
    from torch.distributed.checkpoint._traverse import set_element

    set_element(nested, path, value)


def checkpoint_metadata_classes() -> tuple[Any, Any]:
    """The classes of a file's entry and of a memory format in the metadata of a checkpoint."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _StorageInfo, _MEM_FORMAT_ENCODING


# Optimizers and norms.


def unhooked_step(cls: type[Any]) -> Callable[[Any], object]:
    """The step of an optimizer class without the hooks that torch wraps around it."""
    step: Any = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def allow_foreach(*kinds: type[Tensor]) -> None:
    """Let optimizers and gradient clipping use foreach kernels for these classes; else they loop.

    DTensor does so, too.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        known = getattr(module, "_foreach_supported_types", None)
        if isinstance(known, list):
            known.extend(kind for kind in kinds if kind not in known)


norms_of: Callable[[list[Tensor], float], Sequence[Tensor]] = torch._foreach_norm
"""The norm of each tensor, `()` each."""


def pass_over_frames(*functions: Callable[..., Any]) -> None:
    """Have the compiler skip these functions, but not what they call.

    `torch.compiler.disable(recursive=False)` wraps a function and compiles its body. Without the
    private name, functions are compiled up to a graph break where a unit begins.
    """
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        return
    for function in functions:
        skip_code(function.__code__)
