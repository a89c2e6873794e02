"""Build the checkpoint function of a module: this package's own, or one given by the user.

A checkpoint function is called as `checkpoint_fn(function, *args, **kwargs)` and returns the result
of `function(*args, **kwargs)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ckpt_wrap._checkpoint import Checkpoint, by_position
from ckpt_wrap._errors import OptionError
from ckpt_wrap._options import CheckpointImpl, CheckpointOptions

CheckpointFn = Callable[..., Any]


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


_DEFAULTS = {field.name: field.default for field in fields(CheckpointOptions)}
_OTHER = object()


def make_checkpoint_fn(
    made_by: str,
    /,
    *,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: CheckpointFn | None = None,
    use_reentrant: bool | None = None,
    **options: Any,
) -> CheckpointFn:
    """Return the checkpoint function for the options of `checkpoint_`.

    Args:
        made_by: the called public function, for messages.

    Raises:
        OptionError: `checkpoint_fn` is not callable, a value is invalid, or there are options for
            a missing `checkpoint_fn`.
    """
    if not isinstance(checkpoint_impl, CheckpointImpl):
        raise OptionError(
            f"ckpt_wrap.{made_by}: option 'checkpoint_impl' is {checkpoint_impl!r}, but it must be "
            "a CheckpointImpl. Pass CheckpointImpl.NO_REENTRANT."
        )
    if checkpoint_fn is None:
        unknown = [name for name in options if name not in _DEFAULTS]
        if unknown:
            raise OptionError(
                f"ckpt_wrap.{made_by}: option {unknown[0]!r} needs checkpoint_fn=, which receives "
                f"it; options without it are {', '.join(_DEFAULTS)}. For a policy of sac-policies, "
                "pass checkpoint_fn=sac_policies.checkpoint; for the debug= of torch's checkpoint, "
                "checkpoint_fn=torch.utils.checkpoint.checkpoint, use_reentrant=False."
            )
        return Checkpoint(CheckpointOptions(**options))
    if not callable(checkpoint_fn):
        raise OptionError(
            f"ckpt_wrap.{made_by}: option 'checkpoint_fn' is {checkpoint_fn!r}, but it must be a "
            "function called as checkpoint_fn(function, *args, **kwargs). Pass such a function."
        )
    given = {name: value for name, value in options.items() if value != _DEFAULTS.get(name, _OTHER)}
    if use_reentrant is not None:
        given["use_reentrant"] = use_reentrant
    return BoundCheckpointFn(checkpoint_fn, given)


def _parameter_names(func: CheckpointFn) -> frozenset[str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in by_name)
