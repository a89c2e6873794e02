"""The only file that uses private names of torch.

Each name is looked up once, when this file is imported. All supported versions of torch have it,
except where a fallback is built from public names; `tests/test_torch_compat.py` runs both.

Subclasses of `nn.Module` everywhere build on its dicts (`_modules`, `_parameters`, `_buffers`) and
on `_load_from_state_dict`, so other files use these directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


_C: Any = torch._C


def is_exporting() -> bool:
    """Whether torch.export is tracing; also right inside code that torch.compile traces.

    Dynamo before torch 2.13 traces `torch.compiler.is_exporting()` as True under `torch.compile`,
    too. It reads the flag itself correctly, and guards on it.
    """
    return torch.compiler._is_exporting_flag


def _skip_frames(code: Any, recursive: bool) -> None:
    dynamo = _C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, skip if recursive else default)
    dynamo.set_code_exec_strategy(code, strategy)


def never_compiled(function: F) -> F:
    """Decorator: after a graph break, calls of the function run as Python.

    Without it, dynamo compiles the function's frame on its own, with `is_compiling()` True.
    A trace may still inline the function, and what it calls may still be compiled.
    """
    _skip_frames(function.__code__, False)
    return function


def break_graph(reason: str) -> None:
    """End the graph that `torch.compile` traces here; with `fullgraph=True` an error."""
    torch._dynamo.graph_break(msg=reason)


def never_compiled_inside(function: F) -> F:
    """Decorator: as `never_compiled`, also for everything that the function calls."""
    _skip_frames(function.__code__, True)
    return function


class Saved(Protocol):
    """A tensor kept the way autograd keeps one: version-checked, seen by outer hooks."""

    def unpack(self) -> torch.Tensor:
        """Return the tensor; RuntimeError if it was changed in place since it was saved."""
        ...


class _SaveOnly(torch.autograd.Function):
    """A node that saves its inputs and is never part of a backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None)


class SavedByNode:
    """`Saved`, from public names: a node whose backward never runs saves the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        anchor = torch.empty((), requires_grad=True)
        with torch.enable_grad():
            # The output, not its node: without one, older torch frees what the node saved.
            self._output: Any = _SaveOnly.apply(anchor, tensor)

    def unpack(self) -> torch.Tensor:
        """Return the tensor; RuntimeError if it was changed in place since it was saved."""
        tensor: torch.Tensor = self._output.grad_fn.saved_tensors[0]
        return tensor


def _find_saver() -> Callable[[torch.Tensor], Saved]:
    try:
        from torch._C._autograd import _make_saved_tensor
    except ImportError:
        return SavedByNode
    return lambda tensor: _make_saved_tensor(tensor, is_output=False)


# Keeps a tensor for backward.
save_tensor = _find_saver()

# True where `with torch.device(...)`, or another function mode, may be active.
may_have_function_mode: Callable[[], int] = _C._len_torch_function_stack


def _find_no_dispatch() -> Callable[[], AbstractContextManager[Any]]:
    guard: Any = getattr(torch._C, "_DisableTorchDispatch", nullcontext)
    # Without this guard, modes also see the copies of buffers.
    return guard if hasattr(guard, "__enter__") else nullcontext


_no_dispatch = _find_no_dispatch()


def unseen_by_modes(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context that hides operations on the tensor from modes, unless its class dispatches."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return _no_dispatch() if plain else nullcontext()


# The active transform of `torch.func`, or None. Under a transform no hooks are allowed.
active_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack


# The value of `torch.utils.checkpoint.set_checkpoint_early_stop`, or None.
early_stop_override: Callable[[], bool | None] = partial(
    getattr, torch.utils.checkpoint, "_enable_checkpoint_early_stop", None
)


def bypass_hooks(context: Any) -> None:
    """Let torch's selective context keep results itself instead of passing them to outer hooks.

    Torch up to 2.13 always does so. Newer torch mistakes a region's own hooks for the user's, and
    warns.
    """
    if getattr(context, "respect_saved_tensors_hooks", False) is None:
        context.respect_saved_tensors_hooks = False


def edges(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and child of a module, every alias of a shared child included."""
    yield from ((name, child) for name, child in module._modules.items() if child is not None)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on the module. Does not import it."""
    return any(k.__module__.startswith("torch.distributed.fsdp") for k in type(module).__mro__)


def is_torch_policy(policy: object) -> bool:
    """Whether it is one of torch's policy objects, such as `CustomPolicy`."""
    return callable(getattr(policy, "_run_policy", None))


def run_torch_policy(policy: Any, model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Options per module that torch's policy object selects in `model`."""
    selected: dict[nn.Module, dict[str, Any]] = policy._run_policy(
        model, ignored_modules=set(), root_kwargs={}
    )
    return selected


def storage_key(tensor: torch.Tensor) -> Any:
    """Return a hashable that is equal for tensors of one storage only, while it is kept."""
    return StorageWeakRef(tensor.untyped_storage())


def version_of(tensor: torch.Tensor) -> int:
    """Count of in-place changes; shared by all views and detached copies of the tensor.

    Always 0 for an inference tensor, which has no count.
    """
    try:
        return tensor._version
    except RuntimeError:
        return 0


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """`version_of` for each."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


_version = attrgetter("_version")


# The number that the next hook on any tensor, node or module gets; it only grows.
next_hook_number: Callable[[], int] = partial(getattr, RemovableHandle, "next_id", 0)


def remove_hooks(numbers: range, tensors: list[torch.Tensor], module: nn.Module | None) -> None:
    """Remove hooks with these numbers from tensors, and from a module with all that it contains."""
    modules = () if module is None else module.modules()
    tables = [table for below in modules for name, table in vars(below).items() if "hooks" in name]
    parameters = () if module is None else module.parameters()
    tables += [
        getattr(tensor, name, None) for tensor in (*tensors, *parameters) for name in _TENSOR_HOOKS
    ]
    for table in tables:
        if isinstance(table, dict):
            for number in [n for n in table if isinstance(n, int) and n in numbers]:
                del table[number]


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


# The number that the next node of the autograd graph of this thread gets.
next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


# The class of nodes of the graph that belong to a `torch.autograd.Function`.
CustomNode: Any = _C._FunctionBase


def counter_owner(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose version counter `tensor` uses: its base if it is a view, else itself.

    Tensors of one storage may have different counters: the results of `unsafe_chunk` and
    `unsafe_split`, and `tensor.data`. A detached tensor shares its source's counter, but counts as
    an owner here, because torch does not expose the source.
    """
    base = getattr(tensor, "_base", None)
    return tensor if base is None else base


def is_parameter_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter or was made from one by taking views."""
    base = getattr(tensor, "_base", None)
    return isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `nn.Module.compile` was called on the module."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def is_parametrized_class(kind: Any) -> bool:
    """Whether `torch.nn.utils.parametrize` made the class, for one module and its copies."""
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", None) == parametrize.__name__


def announced(number: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that repeats a forward, and say so to those who measure.

    They put their functions into `torch.autograd.graph.recompute_callbacks`. Each is called with
    the number here, and with None at the end.

    Args:
        number: autograd's number of a node that the code created in the forward; -1 if unknown.
    """
    callbacks = getattr(torch.autograd.graph, "recompute_callbacks", ())
    for callback in callbacks:
        callback(number)
    try:
        return function(*args, **kwargs)
    finally:
        for callback in callbacks:
            callback(None)
