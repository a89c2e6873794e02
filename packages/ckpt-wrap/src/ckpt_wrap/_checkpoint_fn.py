"""Build the checkpoint function of a module: this package's own, or one given by the user.

A checkpoint function is called as `checkpoint_fn(function, *args, **kwargs)` and returns the result
of `function(*args, **kwargs)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckpt_wrap._checkpoint import Checkpoint, by_position
from ckpt_wrap._errors import OptionError
from ckpt_wrap._options import CheckpointImpl, CheckpointOptions

CheckpointFn = Callable[..., Any]


class BoundCheckpointFn:
    """A user's checkpoint function with its options bound.

    Keyword arguments of the module whose names the checkpoint function uses itself are passed by
    position; with `positional=True` all of them are.
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


_DEFAULTS = {f.name: f.default for f in fields(CheckpointOptions) if f.name != "impl"}
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
    """The checkpoint function for the options of `checkpoint_`.

    Args:
        made_by: the public function that was called, for messages.

    Raises:
        OptionError: `checkpoint_fn` is not callable, a value is invalid, options conflict, or
            there are options for a `checkpoint_fn` that is not given.
    """
    if checkpoint_fn is None:
        _require_known(options, made_by)
        impl = _implementation(use_reentrant, checkpoint_impl, made_by)
        own = CheckpointOptions(impl=impl, **options)
        own.require_valid(made_by)
        return Checkpoint(own, made_by)
    if not callable(checkpoint_fn):
        raise OptionError(
            f"ckpt_wrap.{made_by}: option 'checkpoint_fn' is {checkpoint_fn!r}, but it must be a "
            "function called as checkpoint_fn(function, *args, **kwargs). Pass such a function."
        )
    given = {name: value for name, value in options.items() if value != _DEFAULTS.get(name, _OTHER)}
    if use_reentrant is not None:
        given["use_reentrant"] = use_reentrant
    # torch's checkpoint looks for tensors among positional arguments only.
    positional = checkpoint_impl is CheckpointImpl.REENTRANT or checkpoint_fn is torch_checkpoint
    return BoundCheckpointFn(checkpoint_fn, given, positional=positional)


def _require_known(options: Mapping[str, Any], made_by: str) -> None:
    unknown = [name for name in options if name not in _DEFAULTS]
    if "policy" in unknown:
        raise OptionError(
            f"ckpt_wrap.{made_by}: option 'policy' needs checkpoint_fn=. For a policy of "
            "sac-policies, pass checkpoint_fn=sac_policies.checkpoint, policy=..."
        )
    if unknown:
        close = get_close_matches(unknown[0], _DEFAULTS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OptionError(
            f"ckpt_wrap.{made_by}: option {unknown[0]!r} is unknown.{hint} Options that are not "
            "those of torch.utils.checkpoint.checkpoint are only accepted together with "
            "checkpoint_fn=, which receives them."
        )


def _implementation(use_reentrant: object, impl: CheckpointImpl, made_by: str) -> CheckpointImpl:
    """The implementation that `use_reentrant` and `checkpoint_impl` ask for together."""
    if use_reentrant is None:
        return impl
    if not isinstance(use_reentrant, bool):
        raise OptionError(
            f"ckpt_wrap.{made_by}: option 'use_reentrant' is {use_reentrant!r}, but it must be a "
            "bool. Pass True or False."
        )
    if impl is CheckpointImpl.REENTRANT and not use_reentrant:
        raise OptionError(
            f"ckpt_wrap.{made_by}: option 'use_reentrant' is False, but "
            "checkpoint_impl=CheckpointImpl.REENTRANT asks for the opposite. Pass only one of them."
        )
    return CheckpointImpl.REENTRANT if use_reentrant else impl


def _parameter_names(func: CheckpointFn) -> frozenset[str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # some built-in functions have none
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in by_name)
