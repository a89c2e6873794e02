"""The dispatcher: what an operator is, which modes and tensor classes stand before its kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
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


def is_stand_in(kind: type) -> bool:
    """Whether a tensor class is one that torch itself puts in the place of tensors with data."""
    return issubclass(kind, _INTERNAL_TENSORS)


def mode_depth() -> int:
    """Return how many dispatch modes are on in this thread; -1 where torch does not say."""
    depth = look_up("_C._len_torch_dispatch_stack")
    return -1 if depth is None else int(depth())


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


SAYS_HOOKS: bool = look_up("_C._autograd._top_saved_tensors_default_hooks") is not None
"""Whether torch says which hooks for saved tensors are on."""


def top_saved_hooks() -> tuple[Any, Any] | None:
    """Return the innermost hooks for saved tensors of this thread; None if none are known."""
    top = look_up("_C._autograd._top_saved_tensors_default_hooks")
    return None if top is None else top(True)


def leave_saved_hooks(own: saved_tensors_hooks) -> None:
    """Leave hooks for saved tensors, if they are on; those that were entered after them stay on.

    Left by themselves, hooks take off whichever are on top.
    """
    taken: list[saved_tensors_hooks] = []
    try:
        while (hooks := top_saved_hooks()) is not None and hooks[0] != own.pack_hook:
            taken.append(saved_tensors_hooks(*hooks))
            taken[-1].__exit__()
        if hooks is not None:
            own.__exit__()
    finally:
        while taken:
            taken.pop().__enter__()


_plain_tensors = (torch.Tensor, torch.nn.Parameter)
_keys_of: Any = look_up("_C._dispatch_keys")
_PYTHON: Any = look_up("_C.DispatchKey.Python")
_keys_after: Any = look_up("_C._dispatch_keyset_full_after")


def run_inside(
    mode: TorchDispatchMode, operator: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """Run an operator so that a mode sees what its kernel has torch carry out.

    A mode is off while an operator that it was asked about runs. So it is put on again, and the
    operator's kernel is called past it.

    Returns:
        The result, in a tuple; None if this cannot be done, and nothing has run: for tensors of a
        class, without tensors, with a number in the place of a tensor, and where a mode makes
        stand-ins.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if (
        not tensors
        or any(type(tensor) not in _plain_tensors or tensor.is_meta for tensor in tensors)
        or not isinstance(operator, torch._ops.OpOverload)
        or None in (_keys_of, _PYTHON, _keys_after)
        or makes_stand_ins()
        or _has_wrapped_number(operator, args)
    ):
        return None
    keys = _keys_of(tensors[0])
    for tensor in tensors[1:]:
        keys = keys | _keys_of(tensor)
    with mode:
        return (operator.redispatch(keys & _keys_after(_PYTHON), *args, **kwargs),)


def _has_wrapped_number(operator: Any, args: tuple) -> bool:
    arguments = operator._schema.arguments[: len(args)]
    return any(
        str(argument.type) == "Tensor" and not isinstance(value, torch.Tensor)
        for argument, value in zip(arguments, args, strict=True)
    )


def makes_stand_ins() -> bool:
    """Whether a mode of torch's own is on, such as `FakeTensorMode`."""
    at = look_up("_C._get_dispatch_stack_at")
    modes = [None if at is None else at(place) for place in range(mode_depth())]
    return at is None or any(getattr(mode, "_mode_key", None) is not None for mode in modes)
