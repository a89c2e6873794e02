"""Spans of code: parts of a function that have a place of their own in policies.

Rule 1. A span is a place as a module is: what runs in it, also in modules that it calls, is inside
        of the path that the span has, that of the module around it and the span's label.
Rule 2. It does nothing to what it runs. Whoever follows spans runs what is in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from .._errors import PolicyError, shown
from .._torch_compat import annotated

P = ParamSpec("P")
T = TypeVar("T")
Run = Callable[..., Any]
Follower = Callable[[str, Run, tuple[Any, ...], dict[str, Any]], Any]
"""Is given a span's label, what runs its code, and the arguments; returns what that returns."""

_library = torch.library.Library("sac_policies", "FRAGMENT")
_library.define("span(Tensor x) -> Tensor")

SPAN_OP = torch.ops.sac_policies.span.default
"""What a policy is asked about a span: an operator that never runs."""


class _Followers(threading.local):
    def __init__(self) -> None:
        self.stack: list[Follower] = []


followers = _Followers()
"""Its `stack`: those that follow spans on this thread, innermost last."""


class following:  # read as a function; entered by each region
    """Have the spans of this thread run by a follower, inside of those before it."""

    __slots__ = ("_follower",)

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __enter__(self) -> None:
        followers.stack.append(self._follower)

    def __exit__(self, *error: object) -> None:
        followers.stack.remove(self._follower)


class Span(Generic[P, T]):
    """A function whose calls are spans.

    Attributes:
        label: the span's name.
    """

    def __init__(self, function: Callable[P, T], label: str) -> None:
        self.__wrapped__ = function
        self.label = label

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, as a span."""
        run: Run = self.__wrapped__
        if torch.compiler.is_compiling():
            with annotated(self.label):
                return run(*args, **kwargs)
        for follower in reversed(followers.stack):
            run = _Followed(follower, self.label, run)
        return run(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Bind it to an instance, as a function that a class defines."""
        return self if owner is None else MethodType(self, owner)

    def __repr__(self) -> str:
        return f"span({shown(self.__wrapped__)}, {self.label!r})"


class _Followed:
    """A span's code as one follower runs it."""

    __slots__ = ("_follower", "_label", "_run")

    def __init__(self, follower: Follower, label: str, run: Run) -> None:
        self._follower, self._label, self._run = follower, label, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._follower(self._label, self._run, args, kwargs)


def span(function: Callable[P, T], label: str) -> Callable[P, T]:
    """Make a function each call of which is a span: a named part of a region.

    Policies name spans as they name modules: `save_modules("act")` keeps what is made in the span
    `act`, `scoped(policy, "act")` asks a policy in there. Under the recipe engine what such a
    policy recomputes and no rule rebuilds is made by running the span's code again from its
    inputs, with the random numbers and autocast of the forward. Outside of a region a span is a
    plain call.

    Args:
        function: what runs in the span. Whatever tensors it reads and changes from step to step
            should be its arguments. A module is called, but is no submodule of what holds the
            span: write `span(self.act, "act")(x)`, or put a span in place of its `forward`.
        label: any text; several spans may share it.

    Returns:
        A callable that takes what `function` takes; can also stand in for a method.

    Raises:
        PolicyError: `function` cannot be called, or `label` is not text.

    Example:
        >>> import torch.nn.functional as F
        >>> span(F.gelu, "act")(torch.zeros(2))
        tensor([0., 0.])
    """
    if torch.compiler.is_compiling():
        return Span(function, label)
    if not callable(function):
        raise PolicyError(
            f"sac_policies.span: function {shown(function)} is a {type(function).__name__}, but a "
            "span runs code. Pass a function or a module, and call what is returned."
        )
    if not (isinstance(label, str) and label):
        raise PolicyError(
            f"sac_policies.span: label {shown(label)} is a {type(label).__name__} that names "
            "nothing, but a policy finds a span by text. Write for example span(function, 'act')."
        )
    return Span(function, label)
