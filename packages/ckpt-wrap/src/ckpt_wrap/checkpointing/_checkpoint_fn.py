"""The seam to checkpoint functions, this package's own and anyone else's.

A checkpoint function is called as `checkpoint_fn(function, *args, **kwargs)` and returns what
`function(*args, **kwargs)` returns; when it calls the function again is its own affair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckpt_wrap._errors import OptionError
from ckpt_wrap.checkpointing._checkpoint import Checkpoint, by_position
from ckpt_wrap.checkpointing._options import CheckpointImpl, checkpoint_options

CheckpointFn = Callable[..., Any]


class BoundCheckpointFn:
    """Someone's checkpoint function with its options bound.

    A keyword argument of the module whose name that function would take for itself, be it an
    option or a parameter, is handed over by position; with `positional=True` all of them are.
    """

    __slots__ = ("_positional", "_taken", "func", "keywords")

    def __init__(
        self, func: CheckpointFn, keywords: Mapping[str, Any], *, positional: bool
    ) -> None:
        self.func = func
        self.keywords = dict(keywords)
        self._positional = positional
        self._taken = _parameter_names(func).union(keywords)

    def __call__(self, function: CheckpointFn, /, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, by way of the checkpoint function."""
        if not kwargs or not (self._positional or self._taken.intersection(kwargs)):
            return self.func(function, *args, **self.keywords, **kwargs)
        call = by_position(function, len(args), tuple(kwargs))
        return self.func(call, *args, *kwargs.values(), **self.keywords)


def make_checkpoint_fn(
    impl: CheckpointImpl,
    checkpoint_fn: CheckpointFn | None,
    options: Mapping[str, Any],
    made_by: str,
) -> CheckpointFn:
    """The checkpoint function for these options, asked for with the function `made_by`.

    Raises:
        OptionError: `checkpoint_fn` is not callable, or this package's own function does not have
            an option or cannot follow it.
    """
    own = checkpoint_options(impl, options if checkpoint_fn is None else {}, made_by)
    if checkpoint_fn is None:
        return Checkpoint(own, made_by)
    if not callable(checkpoint_fn):
        raise OptionError(
            f"ckpt_wrap.{made_by}: option 'checkpoint_fn' is {checkpoint_fn!r}, but it must be "
            "a function called as checkpoint_fn(function, *args, **kwargs). Pass such a function."
        )
    # torch's checkpoint looks for tensors among positional arguments only.
    positional = impl is CheckpointImpl.REENTRANT or checkpoint_fn is torch_checkpoint
    return BoundCheckpointFn(checkpoint_fn, options, positional=positional)


def checkpoint_fn_from(options: Mapping[str, Any]) -> CheckpointFn:
    """The checkpoint function for options among which may be `checkpoint_impl` and `checkpoint_fn`.

    Raises:
        OptionError: see `make_checkpoint_fn`.
    """
    rest = dict(options)
    impl = rest.pop("checkpoint_impl", CheckpointImpl.NO_REENTRANT)
    return make_checkpoint_fn(impl, rest.pop("checkpoint_fn", None), rest, "checkpoint_")


def _parameter_names(func: CheckpointFn) -> frozenset[str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # some built-in functions have none
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in by_name)
