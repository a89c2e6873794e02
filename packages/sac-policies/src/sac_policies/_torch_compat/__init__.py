"""Every private torch name the package uses, each guarded and with a fallback.

`MISSING` lists the names this torch does not have; the package works without any of them,
and each function says what is lost. Uses no other room.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ._places import annotated as annotated
from ._places import node_meta as node_meta
from ._places import place_of as place_of
from ._places import running_modules as running_modules
from ._saved_hooks import pop_hooks as pop_hooks
from ._saved_hooks import push_hooks as push_hooks
from ._storages import StorageReference as StorageReference
from ._storages import is_freed as is_freed
from ._storages import lies_in_storage as lies_in_storage
from ._storages import storage_bytes as storage_bytes
from ._storages import storage_key as storage_key
from ._storages import storage_under as storage_under

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_NAMES = {
    "keep_graph": "_C._autograd._get_current_graph_task_keep_graph",
    "top_hooks": "_C._autograd._top_saved_tensors_default_hooks",
    "backward_id": "_C._current_graph_task_id",
    "autograd_engine": "autograd.Variable._execution_engine",
    "current_node": "_C._current_autograd_node",
    "sequence": "_C._autograd._get_sequence_nr",
    "fake_tensor": "_subclasses.fake_tensor.FakeTensor",
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
    "save_inputs": "utils.checkpoint._CheckpointFrame.save_inputs.__code__",
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


def backward_keeps_graph() -> bool:
    """Whether the running backward retains its graph; True outside of backward.

    Lost without it: saved values live until their graph does, not until they are read.
    """
    keep_graph = _torch["keep_graph"]
    return True if keep_graph is None else bool(keep_graph())


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


def checkpoint_frame(hooks: Hooks | None) -> Any:
    """Return what torch's checkpoint knows of the region whose hooks these are, None for others.

    Lost where torch names it otherwise: without early stop a gradient inside runs all of it.
    """
    pack = None if hooks is None else hooks[0]
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=True))
    frame = cells["frame"].cell_contents if "frame" in cells else None
    return frame if hasattr(frame, "early_stop") else None


def read_inputs_within(frame: Any, context: Callable[[], Any]) -> None:
    """Have torch's checkpoint bring a region's inputs back inside of `context()`.

    Lost where torch keeps them otherwise: work of hooks around a region is taken for the region's.
    """
    output = getattr(frame, "input_saver", None)  # without it what the node saved is freed
    node: Any = getattr(output, "grad_fn", None)
    if hasattr(type(frame), "get_inputs"):
        read = (type(frame).get_inputs, weakref.proxy(frame))
        frame.get_inputs = functools.partial(_within, context, *read)
    elif hasattr(node, "get_args"):  # torch 2.9
        saved = property(lambda _: _within(context, getattr, node, "saved_tensors"))
        members = {"get_args": staticmethod(node.get_args), "saved_tensors": saved}
        inputs = type("Inputs", (), members)()
        frame.input_saver = types.SimpleNamespace(grad_fn=inputs, output=output)


def _within(context: Callable[[], Any], function: Callable[..., Any], *args: Any) -> Any:
    with context():
        return function(*args)


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


def is_entered(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode is entered on this thread.

    Lost without the name: what an interrupt leaves behind is taken for entered.
    """
    entered = entered_modes()
    return entered is None or any(each is mode for each in entered)


def entered_modes() -> list[TorchDispatchMode] | None:
    """Dispatch modes that see what this thread runs, outermost first; None: not known.

    A backward thread of autograd's has those of the thread that called backward.
    """
    stack = _torch["mode_stack"]
    return None if stack is None else stack()


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


def debug_enabled() -> bool | None:
    """Return what torch's `set_checkpoint_debug_enabled` is set to; None where it is not set.

    Lost without the name: the setting; `debug=True` works as before.
    """
    return getattr(torch.utils.checkpoint, "_checkpoint_debug_enabled", None)


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


current_node: Callable[[], Any] = _torch["current_node"] or (lambda: None)
KNOWS_CURRENT_NODE = _torch["current_node"] is not None
"""The autograd node that runs now; lost where it is not known: results that nodes save are kept."""


def after_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running backward ends; False where torch cannot.

    Lost without it: as for `backward_id`.
    """
    queue = getattr(_torch["autograd_engine"], "queue_callback", None)
    if queue is None or backward_id() < 0:
        return False
    queue(callback)
    return True


def _number_after_a_new_node() -> int:
    with torch.enable_grad():
        return int(node_number(torch.zeros((), requires_grad=True).clone().grad_fn)) + 1


sequence_number: Callable[[], int] = _torch["sequence"] or _number_after_a_new_node
"""Number that this thread's next autograd node will have.

Without the name behind it a node is made to read its number. Lost then: the recipe engine cannot
tell its own nodes, and keeps what it would replay.
"""


_codes = (_torch["save_inputs"], *getattr(_torch["save_inputs"], "co_consts", ()))
_saving_inputs = {id(each) for each in _codes if isinstance(each, types.CodeType)}


def packs_for_a_node(depth: int) -> bool:
    """Whether autograd calls a pack hook, `depth` Python calls from here, for a node it makes.

    A checkpoint saves its inputs so, and no node reads them. Lost where torch names that otherwise:
    what a checkpoint inside a region made is taken for the region's.
    """
    try:
        caller = sys._getframe(depth + 1)
    except ValueError:  # a thread of autograd's own
        return True
    if id(caller.f_code) in _saving_inputs:
        return False
    around = caller.f_back  # a hook may call that of its base class
    return around is None or id(around.f_code) not in _saving_inputs


node_number = operator.methodcaller("_sequence_nr")
"""From an autograd node to its sequence number; nodes made later have larger ones."""


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data; without the name dry runs find nothing to rebuild."""
    kind = _torch["fake_tensor"]
    return tensor.is_meta or (kind is not None and isinstance(tensor, kind))


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
