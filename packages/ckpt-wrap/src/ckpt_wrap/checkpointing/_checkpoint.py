"""One checkpointed call, of either layer and either implementation.

`Checkpoint` decides in this order:

| situation | what runs |
|---|---|
| gradients are off, or `torch.export` traces | the function, as it is |
| `torch.compile` traces | `torch.utils.checkpoint`, which the compiler knows; after a graph \
break inside the function the call runs in eager mode, the function with it |
| `torch.func` transforms the call | the function, as it is |
| neither an input nor a tensor of the module requires grad | a region of `_recompute` without \
options: it keeps nothing unless the function finds a tensor elsewhere that requires grad |
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
from ckpt_wrap._phase import FirstRun
from ckpt_wrap._torch_compat import (
    active_transform,
    bypass_hooks,
    debug_override,
    early_stop_override,
    is_exporting,
    never_compiled,
    never_compiled_inside,
)
from ckpt_wrap._where import Where, owner
from ckpt_wrap.checkpointing._ambient_state import capture
from ckpt_wrap.checkpointing._arguments import Arguments
from ckpt_wrap.checkpointing._call import Call
from ckpt_wrap.checkpointing._module_state import ModuleState
from ckpt_wrap.checkpointing._options import CheckpointImpl, CheckpointOptions
from ckpt_wrap.checkpointing._recompute import CheckpointedRegion
from ckpt_wrap.checkpointing._reentrant import checkpoint_reentrant

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Checkpoint:
    """A checkpoint function: calls another so that backward recomputes what it saved.

    It is called as what `checkpoint_fn=` takes is, `checkpoint_fn(function, *args, **kwargs)`.
    All further arguments are the function's own.
    """

    __slots__ = ("made_by", "name", "options")

    def __init__(
        self, options: CheckpointOptions, made_by: str = "checkpoint_", name: str = ""
    ) -> None:
        self.options = options
        self.made_by = made_by  # the function the user called; for messages
        self.name = name  # of the module, where it is known; for messages

    @never_compiled
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, checkpointed."""
        if not torch.is_grad_enabled() or is_exporting():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _under_compile(self.options, function, args, kwargs)
        if active_transform() is not None:
            return function(*args, **kwargs)
        return self._in_eager_mode(function, args, kwargs)

    # Forward must save the same tensors as recomputation, which backward runs in eager mode.
    @never_compiled_inside
    def _in_eager_mode(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        module, options = owner(function), self.options
        arguments = Arguments(args, kwargs)
        where = Where(function, self.name, self.made_by)
        state = ModuleState(module, where, own_hooks=function is module)
        if _does_more_than_recompute(options) and is_frozen(arguments.tensors, module):
            options = _ONLY_RECOMPUTE
        if options.impl is CheckpointImpl.REENTRANT:
            return checkpoint_reentrant(
                function,
                (args, kwargs),
                arguments,
                state,
                preserve_rng_state=options.preserve_rng_state,
                check=options.determinism_check != "none",
                where=where,
            )
        forward_context, context = _contexts(options, where)
        ambient = capture(arguments.tensors, preserve_rng_state=options.preserve_rng_state)
        call = Call(function, module, where, arguments, ambient, context, state)
        if debug_override() or (options.debug and debug_override() is None):
            return _with_debug(options, call, forward_context, args, kwargs)
        return _region(options, call, forward_context, args, kwargs)


def _contexts(options: CheckpointOptions, where: Where) -> Contexts:
    """The contexts that `context_fn` returns for one call."""
    made = options.context_fn()
    try:
        forward_context, context = made
    except (TypeError, ValueError):
        raise OptionError(
            f"ckpt_wrap.{where.made_by}: option 'context_fn' of module {where} returned "
            f"{made!r}, but it must return two context managers. Return one for forward and "
            "one for recomputation."
        ) from None
    bypass_hooks(forward_context)
    return forward_context, context


def _region(
    options: CheckpointOptions,
    call: Call,
    forward_context: AbstractContextManager[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    override = early_stop_override()
    region = CheckpointedRegion(
        call,
        check=options.determinism_check != "none",
        early_stop=options.early_stop if override is None else override,
    )
    call.begin()
    with region.hooks(), forward_context, FirstRun(call.state):
        result = call.function(*args, **kwargs)
        region.finished = True
    call.end(keep=region.saved_something)
    if not region.finished:
        raise RecomputeError(
            f"ckpt_wrap.{call.where.made_by}: option 'context_fn' gave a forward context that "
            f"suppressed an exception of module {call.where}, but then there is no result. "
            "Let exceptions pass."
        )
    return result


_ONLY_RECOMPUTE = CheckpointOptions()


def _does_more_than_recompute(options: CheckpointOptions) -> bool:
    """Whether the options ask for what would have an effect where nothing requires grad."""
    return (
        options.impl is CheckpointImpl.REENTRANT
        or options.debug
        or options.context_fn is not noop_context_fn
    )


def is_frozen(tensors: list[torch.Tensor], module: nn.Module | None) -> bool:
    """Whether neither an input nor any tensor that can be found in the module requires grad."""
    if module is None or any(tensor.requires_grad for tensor in tensors):
        return False
    return not any(
        tensor.requires_grad
        for below in module.modules()
        for place in (below._parameters, below._buffers, vars(below))
        for tensor in place.values()
        if isinstance(tensor, torch.Tensor)
    )


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
        call.begin()
        with forward_context, FirstRun(call.state):
            return call.function(*args, **kwargs)

    result = torch_checkpoint(
        run,
        use_reentrant=False,
        preserve_rng_state=False,  # the call does it
        determinism_check=options.determinism_check,
        debug=True,
        early_stop=options.early_stop,
    )
    call.end(keep=True)  # here, where the hooks of torch's checkpoint do not see it
    return result
