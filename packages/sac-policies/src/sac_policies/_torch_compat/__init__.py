"""Every private name of torch that the package uses.

The names exist in torch 2.9 to 2.15. A torch without one of them is refused at import, since an
unused fallback would never be tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.fx.traceback
from torch.utils._python_dispatch import TorchDispatchMode

from ._storages import is_freed as is_freed
from ._storages import storage_bytes as storage_bytes
from ._storages import storage_key as storage_key
from ._storages import storage_under as storage_under

T = TypeVar("T")
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def find(path: str) -> Any:
    """Return torch's object at a path.

    Raises:
        ImportError: there is none.
    """
    try:
        return functools.reduce(getattr, path.split("."), torch)
    except AttributeError:
        raise ImportError(
            f"sac_policies needs torch.{path}, which torch {torch.__version__} does not have. "
            "Install a torch between 2.9 and 2.15, or a newer sac_policies."
        ) from None


push_hooks: Callable[..., None] = find("_C._autograd._push_saved_tensors_default_hooks")
"""Enter saved-tensor hooks; a microsecond cheaper than torch's context manager."""
pop_hooks: Callable[[], None] = find("_C._autograd._pop_saved_tensors_default_hooks")
"""Leave the saved-tensor hooks that were entered last."""
backward_id: Callable[[], int] = find("_C._current_graph_task_id")
"""Number of the running backward, -1 outside of backward."""
next_node_number: Callable[[], int] = find("_C._autograd._get_sequence_nr")
"""Number of the next autograd node of this thread."""
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = find(
    "_C._autograd._unsafe_set_version_counter"
)
"""Set the version counters of tensors."""
registered_operators: Callable[[], Iterable[str]] = find("_C._dispatch_get_all_op_names")
"""List the names "ns::op" of all operators."""
tree_leaves: Callable[[Any], list[Any]] = find("utils._pytree.tree_leaves")
_tree_map_only: Callable[..., Any] = find("utils._pytree.tree_map_only")
FAKE_TENSOR: Any = find("_subclasses.fake_tensor.FakeTensor")
fake_mode: Callable[[], AbstractContextManager[Any]] = find(
    "_subclasses.fake_tensor.FakeTensorMode"
)
no_fake_mode: Callable[[], AbstractContextManager[Any]] = find(
    "_subclasses.fake_tensor.unset_fake_temporarily"
)
"""Leave the fake mode for a while."""
RANGE_START: Any = find("ops.profiler._record_function_enter_new.default")
RANGE_END: Any = find("ops.profiler._record_function_exit._RecordFunction")
"""Operators that open and close a profiler range."""

get_precision: Callable[[str, str], str] = find("_C._get_fp32_precision_getter")
set_precision: Callable[[str, str, str], Any] = find("_C._set_fp32_precision_setter")
"""Precision of float32 by library and kind of work."""
get_deterministic: Callable[[], bool] = find("_C._get_deterministic_algorithms")
get_warn_only: Callable[[], bool] = find("_C._get_deterministic_algorithms_warn_only")
set_deterministic: Callable[..., None] = find("_C._set_deterministic_algorithms")
get_mkldnn: Callable[[], bool] = find("_C._get_mkldnn_enabled")
set_mkldnn: Callable[[bool], None] = find("_C._set_mkldnn_enabled")
get_cudnn: Callable[[], bool] = find("_C._get_cudnn_enabled")
set_cudnn: Callable[[bool], None] = find("_C._set_cudnn_enabled")
IS_CUDA_BUILT: bool = find("backends.cuda.is_built")()

saved_tensor_hooks: Callable[[], Hooks | None] = functools.partial(
    find("_C._autograd._top_saved_tensors_default_hooks"), False
)
"""Return the pack and unpack functions of the current saved-tensor hooks; None without any."""

_engine = find("autograd.Variable._execution_engine")
_key_guard = find("_C._SetExcludeDispatchKeyGuard")
_eval_frame = find("_C._dynamo.eval_frame")
_functorch_level = find("_C._functorch.maybe_current_level")
_mode_of = find("_C._get_dispatch_mode")
_MODE_KEYS = find("_C._TorchDispatchModeKey")
_mode_stack = find("utils._python_dispatch._get_current_dispatch_mode_stack")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias that shares the version counter, also below autograd."""
    with _key_guard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def end_if_left(mode: TorchDispatchMode, error: BaseException) -> None:
    """End a dispatch mode if an interrupt skipped its `__exit__`."""
    if _mode_stack()[-1:] == [mode]:
        mode.__exit__(type(error), error, error.__traceback__)


def install_dispatch(mode: type[TorchDispatchMode], dispatch: Callable[..., Any]) -> None:
    """Set `dispatch` as the mode's `__torch_dispatch__` without torch's wrapper around each call.

    torch wraps a `__torch_dispatch__` of the class body to hide it from dynamo, at 0.6 us a call.
    Hiding it once has the same effect.
    """
    hide_from_dynamo(dispatch)
    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]  # torch reads it unbound


def hide_from_dynamo(*functions: Any) -> None:
    """Run functions, and all that they call, without dynamo, if compiled code calls them."""
    action = _eval_frame._FrameAction.SKIP
    for each in functions:
        _eval_frame.set_code_exec_strategy(
            each.__code__, _eval_frame._FrameExecStrategy(action, action)
        )


def in_func_transform() -> bool:
    """Whether a torch.func transform is active."""
    return _functorch_level() not in (None, 0, -1)


def traced_graph() -> torch.fx.Graph | None:
    """Return the graph that AOTAutograd or make_fx is recording; None otherwise."""
    return getattr(getattr(_mode_of(_MODE_KEYS.PROXY), "tracer", None), "graph", None)


def is_traced() -> bool:
    """Whether AOTAutograd or make_fx is tracing operators."""
    return _mode_of(_MODE_KEYS.PROXY) is not None or _mode_of(_MODE_KEYS.FUNCTIONAL) is not None


def node_meta() -> dict[str, Any]:
    """Return the metadata for newly traced nodes; it may be changed in place."""
    return torch.fx.traceback.current_meta


def running_modules() -> str:
    """Return the dotted path of the module whose operators are being traced, "" without one."""
    stack = node_meta().get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view; None if it is not a view."""
    return tensor._base


def after_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running backward ends; False outside of a backward."""
    if backward_id() < 0:
        return False
    _engine.queue_callback(callback)
    return True


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return tensor.is_meta or isinstance(tensor, FAKE_TENSOR)


def in_fake_mode() -> bool:
    """Whether a FakeTensorMode is entered."""
    return _mode_of(_MODE_KEYS.FAKE) is not None


is_measured: Callable[[], Any] = functools.partial(
    vars(find("autograd.graph")).get, "recompute_callbacks"
)
"""Whether someone wants to know of recomputation; see `announced`."""


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


def tree_map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Replace the tensors in nested containers."""
    return _tree_map_only(torch.Tensor, function, value)
