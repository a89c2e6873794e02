"""Hooks at module boundaries that torch.compile keeps, in forward and in backward.

Every hooked module's tensors pass through a custom operator at its entry and at its exit. The
operator is opaque to Dynamo and AOTAutograd, so it stays in the compiled graph and calls the hook
each time the graph runs; its gradient passes through a second operator, which calls the backward
hook. An operator may not return its input, so each passage copies the tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ._containers import GivenInputs, outputs_with, tensors_in
from ._names import walk

Hook = Callable[..., object]
ENTRY, EXIT = "entry", "exit"


@dataclass(frozen=True)
class _Hooks:
    pre_fw: Hook | None
    post_fw: Hook | None
    pre_bw: Hook | None
    post_bw: Hook | None


class _Running:
    """What calls were given that run in Python, or that a KeyboardInterrupt has ended there."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, GivenInputs]] = []

    def add(self, module: nn.Module, given: GivenInputs) -> None:
        """Begin a call of this thread."""
        self._calls.append((threading.get_ident(), id(module), given))

    def remove(self, module: nn.Module, given: GivenInputs | None) -> GivenInputs | None:
        """End the call that was given this, or the last one, if another's hook has lost it."""
        here = (threading.get_ident(), id(module))
        for call in reversed(self._calls):
            if call[:2] == here and given in (None, call[2]):
                self._calls.remove(call)
                return call[2]
        return given

    def put_back(self) -> None:
        """End all, the last first."""
        for _, _, given in reversed(self._calls):
            given.put_back()


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


class _Kwargs(dict[str, Any]):
    """Arguments by name, and with them what the call was given in place of its inputs, and by whom.

    They pass from one hook of a call to the next, and calls in other threads or inside have others.
    """

    given: GivenInputs


def _last_given(kwargs: dict[str, Any]) -> GivenInputs | None:
    return kwargs.given if isinstance(kwargs, _Kwargs) else None


def _given_by(session: int, kwargs: dict[str, Any]) -> GivenInputs | None:
    given = _last_given(kwargs)
    while given is not None and given.session != session:
        given = given.outer
    return given


def _enter_hook(session: int, name: str, running: _Running) -> Callable[..., Any]:
    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        passed = list(_boundary(tensors_in((args, kwargs)), [], session, name, ENTRY))
        given = GivenInputs(passed, session, _last_given(kwargs))
        if not torch.compiler.is_compiling():
            running.add(module, given)
        new_args, new_kwargs = given.exchanged(args, kwargs)
        if given.containers:
            new_kwargs = _Kwargs(new_kwargs)
            new_kwargs.given = given
        return new_args, new_kwargs

    return enter


def _put_back_hook(session: int, running: _Running) -> Callable[..., None]:
    def put_back(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        given = _last_given(kwargs)  # what was given last is taken back first
        if not torch.compiler.is_compiling():
            ours = _given_by(session, kwargs)
            ended = running.remove(module, ours)
            given = ended if ours is None else given
        if given is not None:
            given.put_back()

    return put_back


def _exit_hook(session: int, name: str) -> Callable[..., Any]:
    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        given = _given_by(session, kwargs)
        if given is None:
            given = GivenInputs(tensors_in((args, kwargs)), session)
        passed = list(_boundary(tensors_in(output), given.tensors, session, name, EXIT))
        return outputs_with(output, passed, given)

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
    that are tensors, tuples, lists or dicts of them are passed to hooks; each is copied on its way,
    so what a module writes into a tensor in place stays in the copy. Lists and dicts are the
    caller's own, and what a module changes in them the caller has; those that a module makes, or
    keeps and returns, come out as copies.
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
    running = _Running()
    handles: list[Any] = []
    try:
        for name, module in walk(model):
            if name and (module_filter is None or module_filter(name, module)):
                handles += [
                    module.register_forward_pre_hook(
                        _enter_hook(session, name, running), with_kwargs=True
                    ),
                    module.register_forward_hook(
                        _put_back_hook(session, running), with_kwargs=True, always_call=True
                    ),
                    module.register_forward_hook(_exit_hook(session, name), with_kwargs=True),
                ]
        yield
    finally:
        for handle in handles:
            handle.remove()
        del _sessions[session]
        running.put_back()
