"""Every private torch name the package uses, each guarded and with a fallback.

`MISSING` lists the names this torch does not have; the package works without any of them,
and each function says what is lost. Uses no other room.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ._places import node_meta as node_meta
from ._places import running_modules as running_modules
from ._saved_hooks import pop_hooks as pop_hooks
from ._saved_hooks import push_hooks as push_hooks
from ._storages import is_freed as is_freed
from ._storages import lies_in_storage as lies_in_storage
from ._storages import storage_bytes as storage_bytes
from ._storages import storage_key as storage_key
from ._storages import storage_under as storage_under

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_NAMES = {
    "top_hooks": "_C._autograd._top_saved_tensors_default_hooks",
    "backward_id": "_C._current_graph_task_id",
    "autograd_engine": "autograd.Variable._execution_engine",
    "fake_tensor": "_subclasses.fake_tensor.FakeTensor",
    "fake_mode": "_subclasses.fake_tensor.FakeTensorMode",
    "tree_leaves": "utils._pytree.tree_leaves",
    "set_versions": "_C._autograd._unsafe_set_version_counter",
    "key_guard": "_C._SetExcludeDispatchKeyGuard",
    "op_names": "_C._dispatch_get_all_op_names",
    "set_strategy": "_C._dynamo.eval_frame.set_code_exec_strategy",
    "strategy": "_C._dynamo.eval_frame._FrameExecStrategy",
    "action": "_C._dynamo.eval_frame._FrameAction",
    "functorch_level": "_C._functorch.maybe_current_level",
    "mode_of_key": "_C._get_dispatch_mode",
    "mode_keys": "_C._TorchDispatchModeKey",
    "mode_stack": "utils._python_dispatch._get_current_dispatch_mode_stack",
    "mode_count": "_C._len_torch_dispatch_stack",
    "range_start": "ops.profiler._record_function_enter_new.default",
    "range_end": "ops.profiler._record_function_exit._RecordFunction",
}


def _find(path: str) -> Any:
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


_torch: dict[str, Any] = {name: _find(path) for name, path in _NAMES.items()}
MISSING = tuple(path for name, path in _NAMES.items() if _torch[name] is None)

RANGE_START: Any = _torch["range_start"]
RANGE_END: Any = _torch["range_end"]
"""Operators that open and close a profiler range, None where torch has others.

Lost without them: what FSDP does inside a region counts as the region's.
"""


def saved_tensor_hooks() -> Hooks | None:
    """Return the pack and unpack functions that autograd would use now, None without any.

    Lost without it: values saved by a policy do not pass through the user's hooks.
    """
    top_hooks = _torch["top_hooks"]
    if top_hooks is None:
        return None
    try:
        found: Hooks | None = top_hooks(False)
    except TypeError:  # an older signature without ignore_is_tracing
        found = top_hooks()
    return found


if _torch["key_guard"] is None:

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        """Return a detached alias.

        Lost without the guard: a later in-place change of `tensor` goes unnoticed.
        """
        return tensor.detach()

else:

    def _view_guard() -> Any:
        return _torch["key_guard"](torch._C.DispatchKey.ADInplaceOrView, False)

    class _Guards(threading.local):
        def __init__(self) -> None:  # for each thread: making one costs as much as the alias
            self.guard = _view_guard()

    _guards = _Guards()

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        """Return a detached alias that shares the version counter, also below autograd."""
        # A subclass may run Python in detach, and with it another alias inside this one.
        guard = _guards.guard if type(tensor) is torch.Tensor else _view_guard()
        with guard:
            return tensor.detach()


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Give tensors that are as they were the versions that they had.

    Lost without the name: what autograd saved of them outside of a region is refused in backward.
    """
    if _torch["set_versions"] is not None:
        _torch["set_versions"](tensors, versions)


def end_if_left(mode: TorchDispatchMode, error: BaseException) -> None:
    """End the top dispatch mode of this thread, whose own end an interrupt came before.

    Lost without the name: such a mode stays until the thread ends.
    """
    stack = _torch["mode_stack"]
    if stack is not None and stack()[-1:] == [mode]:
        mode.__exit__(type(error), error, error.__traceback__)


modes_entered: Callable[[], int] = _torch["mode_count"] or (lambda: 1)
"""How many these are. Lost without the name: who asks does without the short way for none."""


def install_dispatch(mode: type[TorchDispatchMode], dispatch: Callable[..., Any]) -> None:
    """Make `dispatch` the mode's __torch_dispatch__ without torch's wrapper around each call.

    torch wraps a __torch_dispatch__ written in the class body, to hide it from dynamo, at
    0.6 us a call. Marking its code as not to be compiled, nor what it calls, does the same
    once. Lost without the names: these 0.6 us.
    """
    if not _hide_from_dynamo(dispatch):
        dispatch = torch.compiler.disable(dispatch, recursive=True)
    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]  # torch reads it unbound


def _hide_from_dynamo(function: Callable[..., Any]) -> bool:
    set_strategy, strategy, action = (_torch[n] for n in ("set_strategy", "strategy", "action"))
    if set_strategy is None or strategy is None or action is None:
        return False
    set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))
    return True


def registered_operators() -> Iterable[str]:
    """Names "ns::op" of every registered operator; without it misspelt ones get no matches."""
    return () if _torch["op_names"] is None else _torch["op_names"]()


def in_func_transform() -> bool:
    """Whether a torch.func transform is active; without the name torch itself refuses it."""
    level = _torch["functorch_level"]
    return level is not None and level() not in (None, 0, -1)


def traced_graph() -> torch.fx.Graph | None:
    """Return the graph that AOTAutograd or make_fx is recording, None when nothing is traced.

    Without the names behind it compiled regions keep torch's tags: everything is recomputed.
    """
    if _torch["mode_of_key"] is None or _torch["mode_keys"] is None:
        return None
    mode = _torch["mode_of_key"](_torch["mode_keys"].PROXY)
    return getattr(getattr(mode, "tracer", None), "graph", None)


def is_traced() -> bool:
    """Whether operators that run now run for AOTAutograd or make_fx, not for their values."""
    mode_of, keys = _torch["mode_of_key"], _torch["mode_keys"]
    if mode_of is None or keys is None:
        return False
    return mode_of(keys.PROXY) is not None or mode_of(keys.FUNCTIONAL) is not None


_base: Any = operator.attrgetter("_base") if hasattr(torch.Tensor, "_base") else lambda tensor: None
base_of: Callable[[torch.Tensor], torch.Tensor | None] = _base
"""From a tensor to the one that it is a view of; to None for others.

Lost without the name: a parameter that a region reads only through views is not guarded.
"""


backward_id: Callable[[], int] = _torch["backward_id"] or (lambda: -1)
"""Number of the running backward, -1 outside of backward.

Lost without it: a replayed value with several readers is replayed for each.
"""


def after_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running backward ends; False where torch cannot.

    Lost without it: as for `backward_id`.
    """
    queue = getattr(_torch["autograd_engine"], "queue_callback", None)
    if queue is None or backward_id() < 0:
        return False
    queue(callback)
    return True


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data; without the name dry runs find nothing to rebuild."""
    kind = _torch["fake_tensor"]
    return tensor.is_meta or (kind is not None and isinstance(tensor, kind))


def in_fake_mode() -> bool:
    """Whether a FakeTensorMode is entered. Lost without the names: fake regions keep everything."""
    mode_of, keys = _torch["mode_of_key"], _torch["mode_keys"]
    return mode_of is not None and keys is not None and mode_of(keys.FAKE) is not None


def fake_mode() -> AbstractContextManager[Any]:
    """Return a mode in which tensors are made without data. Lost without the name: they have it."""
    found: AbstractContextManager[Any] = (_torch["fake_mode"] or nullcontext)()
    return found


FAKE_TENSOR: Any = _torch["fake_tensor"]
"""The class of tensors without data; None where it is not known."""


def tree_leaves(value: Any) -> list[Any]:
    """List the leaves of containers; without the name, of tuples, lists and dicts."""
    return list((_torch["tree_leaves"] or _leaves)(value))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for each in value for leaf in _leaves(each)]
