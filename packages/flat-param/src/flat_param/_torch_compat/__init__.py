"""Every private torch name this package needs, each behind a check and with a fallback."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from .._errors import StateError

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with the hooks that its step calls."""


def default_store() -> Any:
    """The store the default process group was started with.

    Fallback: None; a dead rank is then named only as one of its group.
    """
    c10d = getattr(dist, "distributed_c10d", None)
    look_up: Callable[[], Any] | None = getattr(c10d, "_get_default_store", None)
    return None if look_up is None else look_up()


def drop_default_group_arguments() -> None:
    """Have torch's differentiable collectives keep no process group as the default of an argument.

    Only for the end of a process: torch evaluates these defaults once, when it imports the module.
    Fallback: where the module is not imported, or has other defaults, there is nothing to drop.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        given = getattr(function, "__defaults__", None) or ()
        if any(isinstance(each, dist.ProcessGroup) for each in given):
            kept = (None if isinstance(each, dist.ProcessGroup) else each for each in given)
            function.__defaults__ = tuple(kept)


def pass_over_frames(*functions: Callable[..., Any]) -> None:
    """Have the compiler leave these functions alone, but not what they call.

    `torch.compiler.disable(recursive=False)` puts a wrapper around a function, and compiles the
    function. Fallback: it is compiled up to where a unit begins, with a graph break there.
    """
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        return
    for function in functions:
        skip_code(function.__code__)


def will_run(node: Any) -> bool:
    """Whether the backward pass that runs now will execute `node`.

    Fallback: True for all; a unit with an unused parameter is then reduced at the end of backward.
    """
    ask: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
    return True if ask is None else ask(node)


def current_backward() -> int:
    """A number of the backward pass that this thread is inside of; -1 outside of one.

    Fallback: 0; a forward after a failed backward is then taken for a recomputation.
    """
    task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return 0 if task is None else task()


def backward_is_running() -> bool:
    """Whether this thread is inside a backward pass."""
    return current_backward() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the autograd engine call back once the backward pass that runs now is over.

    Fallback: a StateError, since gradients would otherwise stay on their rank without a word.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        raise StateError(
            f"flat_param.fully_shard: torch {torch.__version__} has no end-of-backward callback, "
            "but gradients are summed over ranks there. Use torch 2.9 to 2.15."
        )
    engine.queue_callback(callback)


def assign_grad(param: Tensor, grad: Tensor) -> None:
    """Make a tensor of the parameter's shape its gradient, whatever floating-point dtype it has.

    Fallback: torch 2.9 has no `grad_dtype` and compares dtypes at the assignment. There an empty
    stand-in of the parameter's dtype is assigned, which then gets the gradient's memory and marks.
    """
    if grad.dtype == param.dtype:
        param.grad = grad
    elif hasattr(Tensor, "grad_dtype"):
        param.grad_dtype = None
        param.grad = grad
    else:
        stand_in = param.detach().new_empty(()).expand(param.shape)
        param.grad = stand_in
        stand_in.data = grad
        vars(stand_in).update(vars(grad))


def grad_hooks(param: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """What `param.register_hook` has registered, in order.

    Fallback: nothing; the hooks are then not called, as autograd never sees a sharded parameter.
    """
    hooks: dict[int, Any] | None = getattr(param, "_backward_hooks", None)
    return list(hooks.values()) if hooks else []


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """What `param.register_post_accumulate_grad_hook` has registered, in order.

    Fallback: as for `grad_hooks`.
    """
    hooks: dict[int, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


def dtensor_spec(
    mesh: Any, placements: Any, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """What a DTensor knows of itself; a subclass that is no view of its elements must set it.

    No fallback: `torch.distributed.checkpoint` gathers DTensors only.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(size, stride, dtype))


def make_wrapper(cls: Any, size: torch.Size, stride: tuple[int, ...], local: Tensor) -> Any:
    """A tensor of a subclass without memory, of the dtype and device of `local`.

    No fallback: torch documents it for tensor subclasses, and only its name is private.
    """
    return Tensor._make_wrapper_subclass(
        cls, size, strides=stride, dtype=local.dtype, device=local.device
    )


def allow_foreach(kind: type[Tensor]) -> None:
    """Let torch's optimizers choose their foreach kernels for parameters of a class.

    Fallback: they loop over the parameters.
    """
    from torch.optim import optimizer

    known = getattr(optimizer, "_foreach_supported_types", None)
    if isinstance(known, list) and kind not in known:
        known.append(kind)


without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which functions ignore `__torch_function__` of subclasses."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing; torch's own subclasses, such as Parameter, have it."""


@contextmanager
def without_storage_warning() -> Iterator[None]:
    """Keep torch's word to itself from users: its checkpoint writer calls `Tensor.storage()`.

    torch 2.9 does so for every tensor it writes, and warns that this is deprecated; no argument
    avoids it. Later versions do not, and their filters stay as they are: those are the process's,
    and another thread may be about to change them.
    """
    if torch.__version__ >= "2.10":  # a TorchVersion, which compares as one
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="TypedStorage is deprecated", category=UserWarning
        )
        yield


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats a tensor as a view of another.

    Fallback: True; one more backward hook is then placed.
    """
    ask: Callable[[Tensor], bool] | None = getattr(torch.Tensor, "_is_view", None)
    return True if ask is None else ask(tensor)


def norms_of(tensors: list[Tensor], order: float) -> Sequence[Tensor]:
    """The norm of each tensor, `()` each.

    Fallback: one after the other, in the place of all of them at once.
    """
    ask: Callable[[list[Tensor], float], Sequence[Tensor]] | None
    ask = getattr(torch, "_foreach_norm", None)
    if ask is None:
        return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]
    return ask(tensors, order)


def replace_unscale(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Wrap the method with which `torch.amp.GradScaler` looks for overflow in an optimizer's grads.

    Both of its ways to a step call it, of optimizers that scale by themselves, too.
    Fallback: False, where torch has no such method: the caller then has to wrap `step`.
    """
    kind = torch.amp.GradScaler
    original: Callable[..., Any] | None = getattr(kind, "_unscale_grads_", None)
    if original is None:
        return False
    setattr(kind, "_unscale_grads_", make(original))  # noqa: B010  # a method, to mypy
    return True


def replace_total_norm(make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> bool:
    """Wrap the function that computes the norm for `torch.nn.utils.clip_grad_norm_`.

    `torch.nn.utils.get_total_norm` is the same object, which others may have imported already, so
    what it calls is wrapped rather than the names under which it is found.
    Fallback: both names, where it calls nothing; False, where torch has no such function: the
    caller then has to wrap `clip_grad_norm_` where it is public.
    """
    original = getattr(clip_grad, "_get_total_norm", None)
    if original is None:
        return False
    for cell in getattr(original, "__closure__", None) or ():
        if callable(cell.cell_contents):
            cell.cell_contents = make(cell.cell_contents)
            return True
    clip_grad._get_total_norm = make(original)
    if getattr(utils, "get_total_norm", None) is original:
        utils.get_total_norm = clip_grad._get_total_norm
    return True
