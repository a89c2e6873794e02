"""Private names of torch's dispatcher, for code that runs inside `__torch_dispatch__`."""

from __future__ import annotations

import functools
import operator
import sys
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from traceback import walk_tb
from types import GeneratorType
from typing import Any

import torch
import torch._library.autograd as _library_autograd
import torch.utils.checkpoint as _checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from . import FAKE_TENSOR, find

__all__ = ["is_wrapper"]

_disabled_dispatch = find("_C._disabled_torch_dispatch_impl")

_exclude = find("_C._ExcludeDispatchKeyGuard")
_set_excluded = find("_C._SetExcludeDispatchKeyGuard")
_KEYS = find("_C.DispatchKey")
no_dispatch = find("_C._DisableTorchDispatch")
"""Hide operators from every dispatch mode and subclass."""


def hidden_from_modes(tensor: torch.Tensor | None) -> AbstractContextManager[Any]:
    """Hide operators on a tensor from every dispatch mode and subclass.

    A fake tensor needs its mode: without it, results are tensors of the meta device.
    """
    is_fake = isinstance(tensor, FAKE_TENSOR)
    found: AbstractContextManager[Any] = nullcontext() if is_fake else no_dispatch()
    return found


no_torch_function = find("_C.DisableTorchFunctionSubclass")
"""Run operators without `__torch_function__` of subclasses."""


def _keys_above() -> Any:
    """Return the keys of autograd and autocast."""
    wanted = ("Autocast", "AutogradCPU", "AutogradOther", "AutogradNestedTensor")
    key_set = find("_C.DispatchKeySet")
    names = [name for name in dir(_KEYS) if name.startswith(wanted)]
    return functools.reduce(operator.or_, (key_set(getattr(_KEYS, name)) for name in names))


_ABOVE = _keys_above()


def below_autograd() -> AbstractContextManager[Any]:
    """Run operators below autograd and autocast, as `__torch_dispatch__` sees them.

    Views share the version counter of their bases, as usual.
    """
    guard: AbstractContextManager[Any] = _exclude(_ABOVE)
    return guard


LETS_COMPILE: bool = (
    _checkpoint._CachingTorchDispatchMode.ignore_compile_internals()
    if hasattr(_checkpoint._CachingTorchDispatchMode, "ignore_compile_internals")
    else True
)
"""Whether compiled code may run as such under a dispatch mode, as in torch's selective checkpoint.

Until torch 2.9 it runs eagerly there: guards see the mode, so each call would compile again.
"""


HOOKS_PASSED_BY: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in signature(_checkpoint.checkpoint).parameters
    else {}
)
"""Options with which the selective mode of torch 2.15 keeps values by itself, as older ones do."""


def leave_checkpoints(error: BaseException) -> None:
    """Leave the hooks and modes of torch's checkpoints that an error passed, innermost first.

    Until torch 2.11 they stay entered as long as the error lives: a suspended generator leaves
    them, and a frame of its traceback holds it.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if frame.f_globals is vars(_checkpoint):
            for each in list(frame.f_locals.values()):
                if isinstance(each, GeneratorType):
                    each.close()


_force = find("_C._ForceDispatchKeyGuard")
_included = find("_C._dispatch_tls_local_include_set")()
_unseen = functools.reduce(
    operator.or_,
    (
        find("_C.DispatchKeySet")(key)
        for key in (_KEYS.Python, _KEYS.PythonTLSSnapshot, _KEYS.PreDispatch)
    ),
    find("_C._dispatch_tls_local_exclude_set")(),
)


def unseen_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias with the same version counter, without any mode seeing it."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        with _force(_included, _unseen):  # one guard is faster than two
            return tensor.detach()
    if kind is FAKE_TENSOR:  # hidden from its mode it would be a tensor of the meta device
        with _set_excluded(_KEYS.ADInplaceOrView, False):
            return tensor.detach()
    with _set_excluded(_KEYS.ADInplaceOrView, False), no_dispatch(), no_torch_function():
        return tensor.detach()


def finish(tensor: torch.Tensor) -> None:
    """Wait for the collective that makes a tensor, if it may still run."""
    wait = getattr(tensor, "trigger_wait", None)  # of an AsyncCollectiveTensor
    if wait is not None:
        with no_dispatch():
            wait()


def boxed_call(op: Any) -> Any:
    """Return a function that calls an operator without its Python wrapper."""
    return getattr(op, "_op", op)


def has_own_dispatch(kind: type) -> bool:
    """Whether operators on tensors of a class run its `__torch_dispatch__`.

    Most subclasses inherit the disabled one, such as those of Parameter. torch lists them among the
    types of a call where the class, not the tensor, asks for dispatch, as for `.data`.
    """
    return getattr(kind, "__torch_dispatch__", _disabled_dispatch) is not _disabled_dispatch


_LIBRARY_FILE = _library_autograd.__file__


def is_called_by_library(depth: int) -> bool:
    """Whether an operator is called by code of `torch.library.register_autograd`.

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
