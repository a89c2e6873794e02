"""Private names of torch's dispatcher, for code that runs inside `__torch_dispatch__`."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch._library.autograd as _library_autograd
import torch.utils._python_dispatch as _python_dispatch
import torch.utils.checkpoint as _checkpoint

_GUARD: Any = getattr(torch._C, "_ExcludeDispatchKeyGuard", None)
_INCLUDE: Any = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)
_NO_DISPATCH: Any = getattr(torch._C, "_DisableTorchDispatch", None)
_KEYS: Any = getattr(torch._C, "DispatchKey", None)
_KEY_SET: Any = getattr(torch._C, "DispatchKeySet", None)
_FAKE: Any = getattr(getattr(torch, "_subclasses", None), "FakeTensor", None)


def _keys_above() -> Any:
    """Return the keys of autograd and autocast."""
    wanted = ("Autocast", "AutogradCPU", "AutogradOther", "AutogradNestedTensor")
    names = [name for name in dir(_KEYS) if name.startswith(wanted)]
    return functools.reduce(operator.or_, (_KEY_SET(getattr(_KEYS, name)) for name in names))


_ABOVE: Any = None if None in (_GUARD, _KEYS, _KEY_SET) else _keys_above()


def below_autograd() -> AbstractContextManager[Any]:
    """Run operators as they are seen by `__torch_dispatch__`: without autograd and autocast.

    The version counters of views stay those of their bases. Lost without the names: operators run
    under `no_grad`, and an autocast around backward changes what is replayed.
    """
    guard: AbstractContextManager[Any] = torch.no_grad() if _ABOVE is None else _GUARD(_ABOVE)
    return guard


no_torch_function: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "DisableTorchFunctionSubclass", nullcontext
)
"""Run operators without `__torch_function__` of subclasses. Lost without the name: they run it."""

is_wrapper: Callable[[Any], bool] = getattr(
    _python_dispatch, "is_traceable_wrapper_subclass", lambda tensor: False
)
"""Whether a tensor has `__tensor_flatten__`. Lost without the name: what it wraps is kept."""


def _selective_mode_ignores() -> bool:
    mode = getattr(_checkpoint, "_CachingTorchDispatchMode", None)
    return bool(getattr(mode, "ignore_compile_internals", lambda: True)())


LETS_COMPILE: bool = _selective_mode_ignores()
"""Whether compiled code may run as such under a dispatch mode, as in torch's selective checkpoint.

Until torch 2.9 it runs eagerly there: guards see the mode, so each call would compile again. Lost
without the name: that.
"""


HOOKS_PASSED_BY: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in signature(_checkpoint.checkpoint).parameters
    else {}
)
"""For torch's checkpoint, so that its selective mode keeps what it saves by itself, as until 2.13.

Lost without the name: nothing; there is no other way then.
"""


def no_dispatch() -> AbstractContextManager[Any]:
    """Hide operators from every dispatch mode and subclass.

    Lost without the name: modes around a region see its copies.
    """
    hidden: AbstractContextManager[Any] = nullcontext() if _NO_DISPATCH is None else _NO_DISPATCH()
    return hidden


def unseen_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias with the same version counter; no mode sees it being made.

    Lost without the names: an in-place change of `tensor` goes unnoticed.
    """
    if _INCLUDE is None or _NO_DISPATCH is None:
        return tensor.detach()
    kind = type(tensor)
    if kind is _FAKE:  # hidden from its mode it would be a tensor of the meta device
        with _INCLUDE(_KEYS.ADInplaceOrView, False):
            return tensor.detach()
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        with _INCLUDE(_KEYS.ADInplaceOrView, False), _NO_DISPATCH():
            return tensor.detach()
    with _INCLUDE(_KEYS.ADInplaceOrView, False), _NO_DISPATCH(), no_torch_function():
        return tensor.detach()


def boxed_call(op: Any) -> Any:
    """Return what calls an operator without the wrapper around it. Lost without the name: time."""
    return getattr(op, "_op", op)


_LIBRARY_FILE = _library_autograd.__file__


def is_called_by_library(depth: int) -> bool:
    """Whether an operator is called by what `torch.library.register_autograd` made.

    There gradients are off, but nothing else runs. The callers of `__torch_dispatch__` are
    `redispatch` and that function.

    Args:
        depth: calls between `__torch_dispatch__` and this one.
    """
    frame = sys._getframe(depth)
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code.co_filename == _LIBRARY_FILE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
