"""All private names of torch that this package uses.

Every torch that this package supports has them, except where a comment names the torch without.
Importing this file calls nothing of torch: a backward or a device call at import would break
programs that fork.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import graph
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

_C: Any = torch._C

# The autograd graph.


NO_TASK = -1
"""Result of `graph_task` if no backward runs in this thread."""

Found = TypeVar("Found")

UNNUMBERED = 2**63
"""Gradient accumulation nodes have at least this number; all others have smaller numbers."""

next_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""Return the number of the next autograd node of this thread."""

graph_task: Callable[[], int] = _C._current_graph_task_id
"""Return the id of the backward that runs in this thread, or `NO_TASK`."""

current_node: Callable[[], Any] = _C._current_autograd_node
"""Return the autograd node that runs in this thread, or None."""

LEAF_NODE: Any = _C._functions.AccumulateGrad
"""Type of the nodes of leaf tensors, which ignore hooks on the node itself."""

in_function_mode: Callable[[], bool] = _C._is_torch_function_mode_enabled
"""Whether a `TorchFunctionMode` is on, which would intercept hooks that are put on a tensor."""


def in_fresh_thread(function: Callable[[], Found]) -> Found:
    """Call a function in a new thread, where no mode of torch is on and no backward runs.

    If no thread can be started, call it in this one.
    """
    found: list[Found] = []
    thread = threading.Thread(target=lambda: found.append(function()), name="mod_tracker")
    try:
        thread.start()
    except RuntimeError:
        return function()
    thread.join()
    return found[0]


@cache
def _empty() -> torch.Tensor:
    return in_fresh_thread(lambda: torch.empty(0, device="cpu"))


def new_carrier() -> torch.Tensor:
    """Return the tensor that attaches hooks to nodes in one thread. Modes do not see it."""
    return nn.Parameter(_empty(), requires_grad=False)


def hook_gradient(
    node: Any, output: int, carrier: torch.Tensor, hook: Callable[[Any], None]
) -> None:
    """Call `hook` with the gradient of one output of a node, before the node runs.

    Like `Tensor.register_hook`, without the dictionary and the handle that make it ten times as
    expensive. `torch.autograd.grad` for that output calls the hook, too.

    Args:
        node: an autograd node.
        output: index of the output.
        carrier: result of `new_carrier` for this thread; used for the first output of a node.
        hook: must return None.
    """
    if output == 0 and not in_function_mode() and type(node) is not LEAF_NODE:
        carrier._backward_hooks = {0: hook}
        node._register_hook_dict(carrier)
    else:
        node.register_prehook(lambda grads: hook(grads[output]))


def number_asking() -> int:
    """Return the number of the running node of this thread; `UNNUMBERED` if no node runs."""
    node = current_node()
    return UNNUMBERED if node is None else number_of(node)


def number_of(node: Any) -> int:
    """Return autograd's number of a node: its order of creation within its thread."""
    number: int = node._sequence_nr()
    return number


def at_backward_end(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running backward ends without an error.

    Returns:
        False if no backward runs: the callback is then never called.
    """
    if graph_task() == NO_TASK:
        return False
    _queue_callback(callback)
    return True


# Bound here: compiled autograd refuses to trace the attribute.
_queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback


# Recomputation.


_STARTS_BACKWARD = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}


@lru_cache(maxsize=64)
def creates_graph(task: int) -> bool:
    """Whether the running backward, with this id, was called with `create_graph=True`.

    The engine does not say, so the caller's frame does. In a thread of a device the caller is in
    another thread: then any backward there may be the one.
    """
    frames = sys._current_frames()
    own = _caller(frames.pop(threading.get_ident()))
    callers = [own] if own is not None else map(_caller, frames.values())
    return any(frame is not None and frame.f_locals["create_graph"] for frame in callers)


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that called a backward; None if there is none."""
    while frame is not None and frame.f_code not in _STARTS_BACKWARD:
        frame = frame.f_back
    return frame


def _is_of(node: Any, *functions: type) -> bool:
    """Whether a node is the backward of one of these autograd functions."""
    return issubclass(getattr(node, "_forward_cls", object), functions)


RecomputeCallback = Callable[[int | None], None]
"""Called with a node's number when recomputation begins, and with None when it ends."""

_lock = threading.RLock()


_recompute_callbacks: list[RecomputeCallback] = []


def add_recompute_callback(callback: RecomputeCallback) -> None:
    """Add a callback to `torch.autograd.graph.recompute_callbacks`, if it is not there.

    Libraries that recompute call the functions in this tuple. It exists while it has any. torch's
    checkpoint does not call them by itself, so it is patched while callbacks of ours are there.
    """
    with _lock:
        if callback not in _recompute_callbacks:
            _recompute_callbacks.append(callback)
        if callback not in _listening():
            graph.recompute_callbacks = (*_listening(), callback)  # type: ignore[attr-defined]
        _patch_checkpoint()


def remove_recompute_callback(callback: RecomputeCallback) -> None:
    """Remove a callback of `add_recompute_callback`, if it is there."""
    with _lock:
        left = tuple(one for one in _listening() if one != callback)
        if left:
            graph.recompute_callbacks = left  # type: ignore[attr-defined]
        elif hasattr(graph, "recompute_callbacks"):
            del graph.recompute_callbacks
        if callback in _recompute_callbacks:
            _recompute_callbacks.remove(callback)
        if not _recompute_callbacks:
            _restore_checkpoint()


def _listening() -> tuple[RecomputeCallback, ...]:
    return getattr(graph, "recompute_callbacks", ())


@contextmanager
def _announced() -> Iterator[None]:
    """Tell the callbacks that a forward runs again, as a library does that recomputes."""
    callbacks = _listening()
    for callback in callbacks:
        callback(-1)
    try:
        yield
    finally:
        for callback in callbacks:
            callback(None)


# The reentrant checkpoint recomputes in the backward of `CheckpointFunction`. The other kind, on
# which other libraries build, recomputes under saved-tensor hooks of this class.
_Hooks: Any = checkpoint._recomputation_hook
_torchs_backward = vars(checkpoint.CheckpointFunction)["backward"]


def _patch_checkpoint() -> None:
    _Hooks.__enter__, _Hooks.__exit__ = _enter_hooks, _exit_hooks
    checkpoint.CheckpointFunction.backward = staticmethod(_backward)  # type: ignore[method-assign]


def _restore_checkpoint() -> None:
    if vars(_Hooks).get("__enter__") is _enter_hooks:
        del _Hooks.__enter__
    if vars(_Hooks).get("__exit__") is _exit_hooks:
        del _Hooks.__exit__
    if checkpoint.CheckpointFunction.backward is _backward:
        checkpoint.CheckpointFunction.backward = _torchs_backward  # type: ignore[method-assign]


def _enter_hooks(hooks: Any) -> Any:
    result = super(_Hooks, hooks).__enter__()
    hooks.announced = _announced()
    hooks.announced.__enter__()
    return result


def _exit_hooks(hooks: Any, *error: Any) -> Any:
    announced = hooks.__dict__.pop("announced", None)
    if announced is not None:  # None: entered before the patch
        announced.__exit__(None, None, None)
    return super(_Hooks, hooks).__exit__(*error)


def _backward(context: Any, *grads: Any) -> Any:
    function = context.run_function

    def run(*inputs: Any) -> Any:
        with _announced():
            return function(*inputs)

    context.run_function = run
    try:
        return _torchs_backward.__func__(context, *grads)
    finally:
        context.run_function = function


# Tensors that nodes save for backward.


SAVED: Any = _C._autograd.SavedTensor
"""Type that holds a tensor for backward, in a node or in torch's checkpoint."""


_SAVES_INPUTS: tuple[type, ...] = tuple(
    filter(None, [getattr(checkpoint, "_NoopSaveInputs", None)])  # torch 2.13 has it no more
)


SHOWS_SAVED = hasattr(SAVED, "data")
"""Whether a node shows what it saved; torch 2.9 does not."""


class SavedValue(NamedTuple):
    """A tensor that a node, or torch's checkpoint, saved.

    Attributes:
        data: the tensor, or the result of the pack hook.
        hook: the unpack hook; None without saved-tensor hooks.
        of_checkpoint: whether this is an input that torch's checkpoint saved.
    """

    data: Any
    hook: Any
    of_checkpoint: bool


def saved_by(node: Any) -> Iterator[SavedValue]:
    """Yield the values that a node saved, without those that a backward has freed."""
    of_checkpoint = _is_of(node, checkpoint.CheckpointFunction, *_SAVES_INPUTS)
    kind: Any = type(node)
    for name in _fields(kind):
        for saved in _saved_in(node, name):
            yield from value_in(saved, of_checkpoint=of_checkpoint)


def inputs_saved_by(node: Any) -> Iterator[SavedValue]:
    """Yield the inputs of torch's checkpoint that a node saves for it, before torch 2.13."""
    if _is_of(node, *_SAVES_INPUTS):
        yield from saved_by(node)


def value_in(saved: Any, *, of_checkpoint: bool) -> Iterator[SavedValue]:
    """Yield the value in an instance of `SAVED`; nothing on torch 2.9."""
    data = getattr(saved, "data", None)
    if data is not None:
        yield SavedValue(data, getattr(saved, "unpack_hook", None), of_checkpoint)


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _saved_in(node: Any, name: str) -> Iterable[Any]:
    try:
        found = getattr(node, name)
    except RuntimeError:  # freed by a backward
        return ()
    return found if isinstance(found, (list, tuple)) else (found,)


# Modules.


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return direct children by attribute name, shared ones under each of their names.

    `named_children` leaves out repeats, and a module may override it.
    """
    own = module.__dict__.get("_modules")
    return own if type(own) is dict or isinstance(own, Mapping) else _listed(module.named_children)


def parameters_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the parameters that the module itself registers, by attribute name."""
    own = module.__dict__.get("_parameters")
    return own if isinstance(own, Mapping) else _listed(module.named_parameters, recurse=False)


def buffers_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the buffers that the module itself registers, by attribute name."""
    own = module.__dict__.get("_buffers")
    return own if isinstance(own, Mapping) else _listed(module.named_buffers, recurse=False)


def _listed(listing: Callable[..., Any], **options: Any) -> dict[str, Any]:
    try:
        return dict(listing(**options))
    except AttributeError:
        # `nn.Module.__init__` has not run; the call of the module raises an error that says so.
        return {}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module: the one inside a wrapper of torch.compile, or itself."""
    if type(module).__name__ != "OptimizedModule":
        return module
    inner = children_of(module).get("_orig_mod")
    return module if inner is None else inner


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module, or of a wrapper of torch.compile, run compiled."""
    in_place = module.__dict__.get("_compiled_call_impl")
    return in_place is not None or unwrap(module) is not module


def is_compiled_graph(module: nn.Module) -> bool:
    """Whether torch.compile created this module; graphs that the user traced do not count."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    if "dynamo_compile_id" in getattr(module, "meta", ()) or hasattr(
        module, "compile_subgraph_reason"
    ):
        return True
    # AOTAutograd's graphs take their inputs in a list and clear it.
    return type(getattr(module.graph, "_codegen", None)).__name__ == "_BoxedCodeGen"


# Compiled code.


_compiled_listeners: list[Callable[[], None]] = []
_torchs_calls: dict[Any, Any] = {}


def on_compiled_code(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` before code of torch's inductor runs; the returned function ends this.

    That code allocates and computes without operators that a mode sees. Other backends run
    operators. The inductor is only patched once something was compiled, since its import is slow.
    """
    from torch._dynamo.callback import callback_handler

    with _lock:
        _compiled_listeners.append(listener)
        if len(_compiled_listeners) == 1:
            callback_handler.register_end_callback(_patch_inductor)
            _patch_inductor()

    def end() -> None:
        with _lock:
            if listener in _compiled_listeners:
                _compiled_listeners.remove(listener)
            if not _compiled_listeners and _patch_inductor in callback_handler.end_callbacks:
                callback_handler.remove_end_callback(_patch_inductor)
                for kind, call in _torchs_calls.items():
                    kind.__call__ = call
                _torchs_calls.clear()

    return end


def _patch_inductor(*_: object) -> None:
    loaded = sys.modules.get("torch._inductor.output_code")
    for kind in (getattr(loaded, name, None) for name in ("CompiledFxGraph", "CompiledAOTI")):
        if kind is not None and kind not in _torchs_calls:
            _torchs_calls[kind] = kind.__call__
            kind.__call__ = _with_listeners(kind.__call__)


def _with_listeners(call: Any) -> Any:
    """Wrap the `__call__` of compiled code so that it tells the listeners."""

    def tell_and_call(graph: Any, inputs: Any) -> Any:
        for listener in tuple(_compiled_listeners):
            listener()
        return call(graph, inputs)

    return tell_and_call


# The dispatcher and modes.


without_torch_function: Callable[[], AbstractContextManager[Any]] = _C.DisableTorchFunctionSubclass
"""Context in which a tensor subclass is treated as a tensor."""


_COMPOSITE: Any = _C.DispatchKey.CompositeImplicitAutograd
_has_kernel: Any = _C._dispatch_has_kernel_for_dispatch_key
_OWN_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd")


def is_composite(operator: Any) -> bool:
    """Whether torch runs an operator by decomposition, as it may in inference mode.

    Some operators, such as `aten.silu_backward`, have both a decomposition and a kernel. torch runs
    the kernel, whose results differ in the last bits.
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    try:
        if not operator._can_decompose():
            return False
        return not any(_has_kernel(operator.name(), key) for key in _OWN_KERNELS)
    except RuntimeError:  # the C++ dispatcher does not know operators such as `aten.sym_size`
        return False


def views_are_noted(operator: Any) -> AbstractContextManager[Any]:
    """Context in which an operator under a mode treats views as without the mode.

    In inference mode `matmul` chooses its kernel by whether a view of a parameter requires a
    gradient. Below a mode views are not tracked. So another kernel would run, whose last bits may
    differ.
    """
    if not torch.is_inference_mode_enabled() or not is_composite(operator):
        return nullcontext()
    guard: AbstractContextManager[Any] = _C._SetExcludeDispatchKeyGuard(
        _C.DispatchKey.ADInplaceOrView, False
    )
    return guard


def run_parts(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator by the decomposition of its C++ kernel, as torch would."""
    if not _has_kernel(operator.name(), _COMPOSITE):  # decomposed in Python
        return operator.decompose(*args, **kwargs)
    return operator._op_dk(_COMPOSITE, *args, **kwargs)


def is_higher_order(operator: Any) -> bool:
    """Whether an operator takes functions, as `torch.cond` does."""
    return isinstance(operator, torch._ops.HigherOrderOperator)


_INTERNAL_TENSORS: tuple[type, ...] = (FakeTensor, FunctionalTensor)


def has_own_operators(kind: type) -> bool:
    """Whether a tensor class has a `__torch_dispatch__`; False for fake tensors and the like."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not torch.Tensor.__torch_dispatch__ and not issubclass(kind, _INTERNAL_TENSORS)


def is_stand_in(kind: type) -> bool:
    """Whether a tensor class is one of torch's for tensors without data, such as `FakeTensor`."""
    return issubclass(kind, _INTERNAL_TENSORS)


mode_depth: Callable[[], int] = _C._len_torch_dispatch_stack
"""Return the number of dispatch modes in this thread."""

_mode_at: Callable[[int], Any] = _C._get_dispatch_stack_at


def is_on(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode is on in this thread."""
    return any(_mode_at(place) is mode for place in range(mode_depth()))


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave a dispatch mode, if it is on; modes that were entered later stay on.

    The mode's `__exit__` would leave the topmost mode instead.
    """
    taken: list[TorchDispatchMode] = []
    try:
        for other in _down_to(mode):
            TorchDispatchMode.__exit__(other, None, None, None)
            taken.append(other)
    finally:
        for other in reversed(taken):
            if other is not mode:
                TorchDispatchMode.__enter__(other)


def _down_to(mode: TorchDispatchMode) -> list[TorchDispatchMode]:
    """Return the modes from the topmost one down to this one; nothing if it is not on."""
    found: list[TorchDispatchMode] = []
    for place in reversed(range(mode_depth())):
        each = _mode_at(place)
        if each is mode:
            return [*found, mode]
        if getattr(each, "_mode_key", None) is None:  # torch stores its own modes elsewhere
            found.append(each)
    return []


_plain_tensors = (torch.Tensor, torch.nn.Parameter)
_keys_of: Any = _C._dispatch_keys
_keys_after: Any = _C._dispatch_keyset_full_after


def run_inside(
    mode: TorchDispatchMode, operator: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """Run an operator so that a mode sees the operators that its kernel calls.

    A mode is off while it handles an operator. So the mode is entered again, and the kernel is
    called directly, without the mode.

    Returns:
        The result, in a tuple. None if this is not possible and nothing was run: for tensor
        subclasses and fake tensors, for calls without tensors, and for calls with a number in place
        of a tensor.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if (
        not tensors
        or any(type(tensor) not in _plain_tensors or tensor.is_meta for tensor in tensors)
        or not isinstance(operator, torch._ops.OpOverload)
        or makes_stand_ins()
        or _has_wrapped_number(operator, args)
    ):
        return None
    keys = _keys_of(tensors[0])
    for tensor in tensors[1:]:
        keys = keys | _keys_of(tensor)
    with mode:
        return (operator.redispatch(keys & _keys_after(_C.DispatchKey.Python), *args, **kwargs),)


def _has_wrapped_number(operator: Any, args: tuple) -> bool:
    arguments = operator._schema.arguments[: len(args)]
    return any(
        str(argument.type) == "Tensor" and not isinstance(value, torch.Tensor)
        for argument, value in zip(arguments, args, strict=True)
    )


def makes_stand_ins() -> bool:
    """Whether one of torch's own modes is on, such as `FakeTensorMode`."""
    modes = map(_mode_at, range(mode_depth()))
    return any(getattr(mode, "_mode_key", None) is not None for mode in modes)


# Out of memory.


_log = logging.getLogger("mod_tracker")

Listener = Callable[[int, int, int], None]
"""Called with the device's index, the bytes requested, and the bytes that are free."""

_listeners: list[Listener] = []
_attached: set[int] = set()


def on_out_of_memory(listener: Listener) -> Callable[[], None]:
    """Call `listener` when an allocation on CUDA fails; the returned function ends this.

    A torch without CUDA has no observer. Exceptions of the listener are logged, since torch would
    raise them in place of its own error.
    """
    _listeners.append(listener)
    attach = getattr(_C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and id(attach) not in _attached:
        _attached.add(id(attach))
        torch.cuda._lazy_call(lambda: attach(_tell))  # needs an initialized CUDA

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def _tell(device: int, asked: int, total: int, free: int) -> None:
    for listener in list(_listeners):
        try:
            listener(device, asked, free)
        except Exception:
            _log.exception("mod_tracker: the page on memory that ran out could not be written")
