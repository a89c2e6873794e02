"""Build the checkpoint function of a module: this package's own, or one given by the user.

A checkpoint function is called as `checkpoint_fn(function, *args, **kwargs)` and returns the result
of `function(*args, **kwargs)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ckpt_wrap._checkpoint import Checkpoint, by_position
from ckpt_wrap._options import CheckpointFn, CheckpointOptions


class BoundCheckpointFn:
    """A user's checkpoint function with its options bound.

    Keyword arguments of the module whose names the checkpoint function uses itself are passed by
    position.
    """

    def __init__(self, func: CheckpointFn, keywords: Mapping[str, Any]) -> None:
        self.func = func
        self.keywords = dict(keywords)
        self._taken = _parameter_names(func).union(keywords)

    def __call__(self, function: CheckpointFn, /, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, by way of the checkpoint function."""
        if not self._taken.intersection(kwargs):
            return self.func(function, *args, **self.keywords, **kwargs)
        call = by_position(function, len(args), tuple(kwargs))
        return self.func(call, *args, *kwargs.values(), **self.keywords)


def make_checkpoint_fn(options: CheckpointOptions) -> CheckpointFn:
    """Return the checkpoint function for these options."""
    if options.checkpoint_fn is None:
        return Checkpoint(options)
    return BoundCheckpointFn(options.checkpoint_fn, options.for_checkpoint_fn())


def _parameter_names(func: CheckpointFn) -> frozenset[str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in by_name)
