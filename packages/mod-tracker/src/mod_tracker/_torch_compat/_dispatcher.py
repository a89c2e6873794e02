"""The dispatcher: what an operator is, which modes and tensor classes stand before its kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from threading import local
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._look_up import look_up


def without_torch_function() -> AbstractContextManager[Any]:
    """Context in which a tensor subclass is treated as a tensor."""
    disable = look_up("_C.DisableTorchFunctionSubclass")
    return nullcontext() if disable is None else disable()


_COMPOSITE: Any = look_up("_C.DispatchKey.CompositeImplicitAutograd")
_has_kernel: Any = look_up("_C._dispatch_has_kernel_for_dispatch_key")
_OWN_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd")


def is_composite(operator: Any) -> bool:
    """Whether an operator is carried out by its parts, as in inference mode it must be.

    Some have parts and a kernel of their own, as `aten.silu_backward` has. torch runs the kernel,
    and its result differs from that of the parts in the last bits.
    """
    can = getattr(operator, "_can_decompose", None)
    try:
        if can is None or not can():
            return False
        return not any(_has_kernel(operator.name(), key) for key in _OWN_KERNELS)
    except (AttributeError, RuntimeError, TypeError):
        # Of an operator that torch's C++ dispatcher does not know, as `aten.sym_size` is.
        return False


_set_excluded: Any = look_up("_C._SetExcludeDispatchKeyGuard")
_VIEWS: Any = look_up("_C.DispatchKey.ADInplaceOrView")


def views_are_noted(operator: Any) -> AbstractContextManager[Any]:
    """Context in which an operator that a mode runs has views inside as without the mode.

    In inference mode a view of a parameter needs a gradient as the parameter does, and by that a
    product in several dimensions is carried out as one or as many. Below a mode nobody notes what
    is a view, so the other kernel would run, whose last bits may differ.
    """
    if not torch.is_inference_mode_enabled() or not is_composite(operator):
        return nullcontext()
    if _set_excluded is None or _VIEWS is None:
        return nullcontext()
    guard: AbstractContextManager[Any] = _set_excluded(_VIEWS, False)
    return guard


def run_parts(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Carry out an operator by its parts: those of its C++ kernel, which torch would run."""
    run = getattr(operator, "_op_dk", None)
    if run is None or _COMPOSITE is None or not _has_kernel(operator.name(), _COMPOSITE):
        return operator.decompose(*args, **kwargs)
    return run(_COMPOSITE, *args, **kwargs)


_HigherOrderOperator: Any = look_up("_ops.HigherOrderOperator")


def is_higher_order(operator: Any) -> bool:
    """Whether an operator is one that takes functions, as `torch.cond` does."""
    return _HigherOrderOperator is not None and isinstance(operator, _HigherOrderOperator)


_INTERNAL_TENSORS: tuple[type, ...] = tuple(
    kind
    for dotted in (
        "_subclasses.fake_tensor.FakeTensor",
        "_subclasses.functional_tensor.FunctionalTensor",
    )
    if (kind := look_up(dotted)) is not None
)


def has_own_operators(kind: type) -> bool:
    """Whether a tensor class carries out operators itself, and is none of torch's stand-ins."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not torch.Tensor.__torch_dispatch__ and not issubclass(kind, _INTERNAL_TENSORS)


def mode_depth() -> int:
    """Return how many dispatch modes are on in this thread; -1 where torch does not say."""
    depth = look_up("_C._len_torch_dispatch_stack")
    return -1 if depth is None else int(depth())


def top_mode() -> Any:
    """Return the dispatch mode that is asked first, or None if there is none, or none is known."""
    at, depth = look_up("_C._get_dispatch_stack_at"), mode_depth()
    return None if at is None or depth < 1 else at(depth - 1)


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave a dispatch mode, if it is on; those that were entered after it stay on.

    Left by itself, a mode takes off whichever is on top.
    """
    if mode_depth() < 0:
        mode.__exit__(None, None, None)
        return
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
    """Modes from the topmost to this one; none if it is not on."""
    at = look_up("_C._get_dispatch_stack_at")
    found: list[TorchDispatchMode] = []
    for place in reversed(range(mode_depth())):
        each = at(place)
        if each is mode:
            return [*found, mode]
        if getattr(each, "_mode_key", None) is None:  # torch's own have a place of their own
            found.append(each)
    return []


def says_saved_hooks() -> bool:
    """Whether torch says which hooks for saved tensors are on."""
    return look_up("_C._autograd._top_saved_tensors_default_hooks") is not None


def top_saved_hooks() -> tuple[Any, Any] | None:
    """Return the innermost hooks for saved tensors of this thread; None if none are known."""
    top = look_up("_C._autograd._top_saved_tensors_default_hooks")
    return None if top is None else top(True)


def guarded_keys() -> tuple[int, int] | None:
    """Return what contexts of torch have switched in this thread's dispatcher; None if unknown.

    Some, such as inference mode, bring everything back as they found it when they end, what was
    switched inside of them included. Those of autocast do not, and modes switch keys of their own:
    both are left out.
    """
    sets = [
        look_up("_C._dispatch_tls_local_include_set"),
        look_up("_C._dispatch_tls_local_exclude_set"),
    ]
    kinds = look_up("_C.DispatchKey"), look_up("_C.DispatchKeySet")
    if None in sets or None in kinds or torch.is_inference_mode_enabled():
        return None
    include, exclude = (found().raw_repr() & ~_unguarded_keys() for found in sets)
    return include, exclude


@cache
def _unguarded_keys() -> int:
    keys, key_set = look_up("_C.DispatchKey"), look_up("_C.DispatchKeySet")
    found = 0
    for name in vars(keys):
        if name.startswith("Autocast") or name in ("Python", "PythonTLSSnapshot"):
            found |= key_set(getattr(keys, name)).raw_repr()
    return found


def is_stand_in(kind: type) -> bool:
    """Whether a tensor class is one that torch itself puts in the place of tensors with data."""
    return issubclass(kind, _INTERNAL_TENSORS)


_compiling: Any = look_up("_guards._TLS") or local()


def compile_question() -> Callable[[], Any]:
    """Return what says what torch.compile is at work on in this thread; None if it is not.

    What runs then is a trial of its own. This is asked at every operator that is watched: a
    thread's dictionary answers in a tenth of the time that an attribute which is not there takes,
    and is the same as long as the thread lives.
    """
    return partial(_compiling.__dict__.get, "compile_context")


def is_dispatched(operator: Any) -> bool:
    """Whether torch's dispatcher knows an overload; some are for TorchScript's numbers only."""
    try:
        return getattr(operator, "_handle", None) is not None
    except RuntimeError:
        return False


def intercept(operator: Any, make: Callable[[Any, Any], Any]) -> Callable[[], None] | None:
    """Have an operator's calls go through a function, in every thread, until that is undone.

    Where modes and tensor subclasses have had their turn, right before the kernel of the device:
    the place is free for all operators but those that make tensors of nothing.

    Args:
        operator: an overload, such as `torch.ops.aten.mm.default`.
        make: called with `(run, below)`; returns the function, which is called with `keys` before
            the operator's arguments, and returns `run(keys & below, *args, **kwargs)`.

    Returns:
        The function that undoes it; None where torch does not offer this for the operator.
    """
    key = look_up("_C.DispatchKey.BackendSelect")
    keys_after = look_up("_C._dispatch_keyset_full_after")
    has_kernel = look_up("_C._dispatch_has_kernel_for_dispatch_key")
    handle = getattr(operator, "_handle", None)
    run = getattr(handle, "redispatch_boxed", None)
    if key is None or keys_after is None or has_kernel is None or run is None:
        return None
    namespace, _, name = operator.name().partition("::")
    if has_kernel(operator.name(), "BackendSelect"):
        return None
    kernel = make(run, keys_after(key))
    try:
        library = torch.library.Library(namespace, "IMPL")
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    except (AttributeError, RuntimeError, TypeError):
        return None
    computed = look_up("_C._dispatch_get_computed_kernel_for_dispatch_key")
    registered = None if computed is None else computed(operator.name(), key)

    def undo() -> None:
        _undone.append(registered)
        library._destroy()

    return undo


_undone: deque[Any] = deque(maxlen=4096)
"""Kernels that are not registered any more. torch frees them at once, without this, though a thread
that has found one may wait for the interpreter's lock, and calls it then."""


_DENSE = frozenset({"CPU", "CUDA", "HIP", "XPU", "MPS", "HPU", "MTIA", "PrivateUse1"})


def is_dense(keys: Any) -> bool:
    """Whether the kernel that is next for keys is one for dense tensors with data on a device.

    Where torch has tensors stand in for others, those are without data here, if they come so far.
    """
    first = getattr(keys, "highestPriorityTypeId", None)
    return first is not None and first().name in _DENSE


@cache
def can_intercept() -> bool:
    """Whether `intercept` sees a product, changes nothing about it, and can be undone."""
    seen: list[int] = []

    def make(run: Callable[..., Any], below: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(args))
            return run(keys & below, *args, **kwargs)

        return kernel

    with torch.inference_mode(), torch.device("cpu"):
        matrix = torch.full((2, 2), 3.0)
        undo = intercept(torch.ops.aten.mm.default, make)
        if undo is None:
            return False
        try:
            product = torch.mm(matrix, matrix)
        except (RuntimeError, TypeError):
            return False
        finally:
            undo()
        torch.mm(matrix, matrix)
    return seen == [2] and product.tolist() == [[18.0, 18.0], [18.0, 18.0]]
