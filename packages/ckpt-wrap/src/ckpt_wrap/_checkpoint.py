"""Torch: one checkpointed call, whichever layer or implementation asks for it.

`Checkpoint` decides in this order:

| situation | what runs |
|---|---|
| gradients are off, or `torch.export` traces | the function, as it is |
| `torch.compile` traces | `torch.utils.checkpoint`, which the compiler knows |
| `torch.func` transforms the call, or nothing in it requires grad | the function, as it is |
| `REENTRANT` | `torch.utils.checkpoint` over all tensors of the call, in `_reentrant` |
| `debug=True` | `torch.utils.checkpoint`, which can print operators |
| otherwise | a region of `_recompute` |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap._errors import OptionError, RecomputeError
from ckpt_wrap._options import CheckpointImpl, CheckpointOptions
from ckpt_wrap._phase import recomputing, regional
from ckpt_wrap._recompute import Call, Region
from ckpt_wrap._reentrant import checkpoint_reentrant
from ckpt_wrap._replay import capture
from ckpt_wrap._selective import honour_offload
from ckpt_wrap._torch_compat import (
    active_transform,
    debug_override,
    early_stop_override,
    save_tensor,
)
from ckpt_wrap._tree import flatten
from ckpt_wrap._where import describe, owner

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Checkpoint:
    """A checkpoint engine: calls a function so that backward recomputes what it saved.

    Its call shape, `engine(function, *args, **kwargs)`, is the one `checkpoint_fn=` asks for.
    All arguments after the function, whatever their names, are the function's own.
    """

    __slots__ = ("name", "options")

    def __init__(self, options: CheckpointOptions, name: str = "") -> None:
        self.options = options
        self.name = name  # of the module, where it is known; for messages

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, checkpointed."""
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _under_compile(self.options, function, args, kwargs)
        if active_transform() is not None:
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        templates = flatten(args, tensors), flatten(kwargs, tensors) if kwargs else kwargs
        module = owner(function)
        if is_frozen(tensors, module):
            return function(*args, **kwargs)
        options = self.options
        if options.impl is CheckpointImpl.REENTRANT:
            return checkpoint_reentrant(
                _phased(function, module),
                tensors,
                templates,
                preserve_rng_state=options.preserve_rng_state,
                check=options.determinism_check != "none",
                where=describe(function, self.name),
            )
        forward_context, context = self._contexts(function)
        around = capture(tensors, preserve_rng_state=options.preserve_rng_state)
        inputs = tuple([save_tensor(tensor) for tensor in tensors])
        call = Call(function, module, self.name, inputs, *templates, around, context)
        if debug_override() or (options.debug and debug_override() is None):
            return _with_debug(options, call, forward_context, args, kwargs)
        return _region(options, call, forward_context, args, kwargs)

    def _contexts(self, function: Callable[..., Any]) -> Contexts:
        """What `context_fn` gives for one call."""
        made = self.options.context_fn()
        if self.options.context_fn is noop_context_fn:
            return made
        where = describe(function, self.name)
        try:
            forward_context, context = made
        except (TypeError, ValueError):
            raise OptionError(
                f"ckpt_wrap.checkpoint: option 'context_fn' of module {where} returned {made!r}, "
                "but it must return two context managers. Return one for forward and one for "
                "recomputation."
            ) from None
        return honour_offload(forward_context, context, owner(function), where), context


def _region(
    options: CheckpointOptions,
    call: Call,
    forward_context: AbstractContextManager[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    override = early_stop_override()
    region = Region(
        call,
        check=options.determinism_check != "none",
        early_stop=options.early_stop if override is None else override,
    )
    with region.hooks(), forward_context, regional:
        result = call.function(*args, **kwargs)
        region.finished = True
    if not region.finished:
        raise RecomputeError(
            "ckpt_wrap.checkpoint: option 'context_fn' gave a forward context that suppressed "
            f"an exception of module {call.where}, but then there is no result. "
            "Let exceptions pass."
        )
    return result


def is_frozen(tensors: list[torch.Tensor], module: nn.Module | None) -> bool:
    """Whether a call can have no gradient: no input and no parameter requires one."""
    for tensor in tensors:
        if tensor.requires_grad:
            return False
    return module is not None and not any(p.requires_grad for p in module.parameters())


def _under_compile(
    options: CheckpointOptions,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    extra: dict[str, Any] = {}
    if options.context_fn is not noop_context_fn:
        extra["context_fn"] = options.context_fn
    return torch_checkpoint(
        by_position(function, len(args), tuple(kwargs)),
        *args,
        *kwargs.values(),
        use_reentrant=options.impl is CheckpointImpl.REENTRANT,
        preserve_rng_state=options.preserve_rng_state,
        **extra,
    )


def by_position(
    function: Callable[..., Any], count: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    """`function`, taking by position what it takes by keyword after `count` arguments."""

    def call(*flat: Any) -> Any:
        return function(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

    return call


def _with_debug(
    options: CheckpointOptions,
    call: Call,
    forward_context: AbstractContextManager[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    first = [(args, kwargs)]  # taken out, so that the closure does not keep the inputs

    def run() -> Any:
        if not first:
            return call.again()
        args, kwargs = first.pop()
        with forward_context:
            return call.function(*args, **kwargs)

    return torch_checkpoint(
        run,
        use_reentrant=False,
        preserve_rng_state=False,  # the call does it
        determinism_check=options.determinism_check,
        debug=True,
        early_stop=options.early_stop,
    )


def _phased(function: Callable[..., Any], module: nn.Module | None) -> Callable[..., Any]:
    """The function, marked as recomputing from its second run on."""
    ran = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        if ran:
            with recomputing(module):
                return function(*args, **kwargs)
        ran = True
        return function(*args, **kwargs)

    return run
