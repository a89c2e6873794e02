"""Hooks at module boundaries that torch.compile keeps, in forward and in backward.

Every hooked module's tensors pass through a custom operator at its entry and at its exit. The
operator is opaque to Dynamo and AOTAutograd, so it stays in the compiled graph and calls the hook
each time the graph runs; its gradient passes through a second operator, which calls the backward
hook. An operator may not return its input, so each passage copies the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ._names import walk

Hook = Callable[..., object]
ENTRY, EXIT = "entry", "exit"


@dataclass(frozen=True)
class _Hooks:
    pre_fw: Hook | None
    post_fw: Hook | None
    pre_bw: Hook | None
    post_bw: Hook | None


_sessions: dict[int, _Hooks] = {}
_numbers = count()


@torch.library.custom_op("mod_tracker::boundary", mutates_args=())
def _boundary(
    tensors: Sequence[Tensor], inputs: Sequence[Tensor], session: int, name: str, side: str
) -> list[Tensor]:
    hooks = _sessions.get(session)
    if hooks is not None and side == ENTRY and hooks.pre_fw is not None:
        hooks.pre_fw(name, tuple(tensors))
    if hooks is not None and side == EXIT and hooks.post_fw is not None:
        hooks.post_fw(name, tuple(inputs), tuple(tensors))
    return [tensor.clone() for tensor in tensors]


@torch.library.custom_op("mod_tracker::boundary_backward", mutates_args=())
def _boundary_backward(grads: Sequence[Tensor], session: int, name: str, side: str) -> list[Tensor]:
    hooks = _sessions.get(session)
    hook = None if hooks is None else hooks.pre_bw if side == EXIT else hooks.post_bw
    if hook is not None:
        hook(name, tuple(grads))
    return [grad.clone() for grad in grads]


@_boundary.register_fake
def _boundary_fake(
    tensors: Sequence[Tensor], inputs: Sequence[Tensor], session: int, name: str, side: str
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


@_boundary_backward.register_fake
def _boundary_backward_fake(
    grads: Sequence[Tensor], session: int, name: str, side: str
) -> list[Tensor]:
    return [torch.empty_like(grad) for grad in grads]


def _remember(ctx: Any, inputs: tuple, output: Any) -> None:
    _, seen, ctx.session, ctx.name, ctx.side = inputs
    ctx.seen = len(seen)


def _pass_back(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    known = [grad for grad in grads if grad is not None]
    passed = iter(_boundary_backward(known, ctx.session, ctx.name, ctx.side))
    back = [None if grad is None else next(passed) for grad in grads]
    return back, [None] * ctx.seen, None, None, None


_boundary.register_autograd(_pass_back, setup_context=_remember)


def _floating(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _floating(item)]
    return []


def _replaced(value: Any, fresh: list[Tensor]) -> Any:
    """The value with the next of `fresh` for each tensor that `_floating` finds in it."""
    if isinstance(value, Tensor):
        return fresh.pop(0) if value.is_floating_point() or value.is_complex() else value
    if not _floating(value):
        return value
    kind = type(value)
    if isinstance(value, dict):
        parts = {key: _replaced(item, fresh) for key, item in value.items()}
        return parts if kind is dict else _with_items(value, parts)
    items = [_replaced(item, fresh) for item in value]
    if kind in (tuple, list):
        return kind(items)
    if isinstance(value, tuple):
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return _with_items(value, dict(enumerate(items)))


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    """A copy of a dict or list of another class, with these items; itself, if it has no copy."""
    try:
        made = copy.copy(value)
        for place, item in items.items():
            made[place] = item
    except Exception:  # of a class that refuses to be written to, in whatever words
        return value
    return made


def _enter_hook(session: int, name: str) -> Callable[..., Any]:
    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        tensors = _floating((args, kwargs))
        passed = list(_boundary(tensors, [], session, name, ENTRY))
        return _replaced((args, kwargs), passed)

    return enter


def _exit_hook(session: int, name: str) -> Callable[..., Any]:
    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        tensors, inputs = _floating(output), _floating((args, kwargs))
        passed = list(_boundary(tensors, inputs, session, name, EXIT))
        return _replaced(output, passed)

    return leave


@contextmanager
def compile_safe_hooks(
    model: nn.Module,
    *,
    pre_fw_hook: Hook | None = None,
    post_fw_hook: Hook | None = None,
    pre_bw_hook: Hook | None = None,
    post_bw_hook: Hook | None = None,
    module_filter: Callable[[str, nn.Module], bool] | None = None,
) -> Iterator[None]:
    """Call hooks at the boundaries of all modules below `model`, compiled or not.

    Compile the model inside the block, or before it at the price of one recompilation. After the
    block the model is as before. Only floating-point and complex tensors in arguments and outputs
    that are tensors, tuples, lists or dicts of them are passed to hooks; each is copied on its way.
    Outside of this the model computes what it would compute, bit for bit.

    Args:
        model: its submodules are hooked, itself not.
        pre_fw_hook: called with `(name, inputs)`; `name` is the state_dict prefix below `model`.
        post_fw_hook: called with `(name, inputs, outputs)`.
        pre_bw_hook: called with `(name, gradients of the outputs)`.
        post_bw_hook: called with `(name, gradients of the inputs)`, if an input requires one.
        module_filter: called with `(name, module)`; only modules for which it is true are hooked.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with compile_safe_hooks(model, pre_fw_hook=lambda name, inputs: print(name)):
        ...     output = model(torch.ones(1, 2))
        0
        1
    """
    session = next(_numbers)
    _sessions[session] = _Hooks(pre_fw_hook, post_fw_hook, pre_bw_hook, post_bw_hook)
    handles: list[Any] = []
    try:
        for name, module in walk(model):
            if name and (module_filter is None or module_filter(name, module)):
                handles += [
                    module.register_forward_pre_hook(_enter_hook(session, name), with_kwargs=True),
                    module.register_forward_hook(_exit_hook(session, name), with_kwargs=True),
                ]
        yield
    finally:
        for handle in handles:
            handle.remove()
        del _sessions[session]
