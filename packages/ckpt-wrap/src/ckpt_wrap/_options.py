"""The options of checkpointing and of offload: their names, types, defaults and values.

Each public function that takes them has the signature that a decorator of this file gives it.
"""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import nn
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap._errors import OptionError

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
CheckpointFn = Callable[..., Any]
P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


class CheckpointImpl(enum.Enum):
    """The two implementations of torch's checkpoint, for code that names them.

    Here both mean the same: forward records the graph, and backward recomputes saved tensors when
    they are read. It does all that torch's reentrant implementation does.
    """

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


class CheckpointOptions:
    """How a module is checkpointed; `checkpoint_` describes each option.

    Args:
        by: the called public function, for messages.

    Raises:
        OptionError: a value is invalid, or there are options for a missing `checkpoint_fn`.
    """

    def __init__(
        self,
        by: str,
        /,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: CheckpointFn | None = None,
        *,
        use_reentrant: bool | None = None,
        preserve_rng_state: bool = True,
        context_fn: ContextFn = noop_context_fn,
        determinism_check: str = "default",
        early_stop: bool = True,
        debug: bool = False,
        **checkpoint_fn_options: Any,
    ) -> None:
        self.checkpoint_fn = checkpoint_fn
        self.use_reentrant = use_reentrant
        self.preserve_rng_state = preserve_rng_state
        self.context_fn = context_fn
        self.determinism_check = determinism_check
        self.early_stop = early_stop
        self.debug = debug
        self._others = checkpoint_fn_options
        if not isinstance(checkpoint_impl, CheckpointImpl):
            raise OptionError(
                f"ckpt_wrap.{by}: option 'checkpoint_impl' is {checkpoint_impl!r}, but it must be "
                "a CheckpointImpl. Pass CheckpointImpl.NO_REENTRANT."
            )
        for name in ("use_reentrant", "preserve_rng_state", "early_stop", "debug"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "use_reentrant" and value is None):
                raise OptionError(
                    f"ckpt_wrap.{by}: option {name!r} is {value!r}, but it must be a bool. Pass "
                    "True or False."
                )
        if determinism_check not in ("default", "none"):
            raise OptionError(
                f"ckpt_wrap.{by}: option 'determinism_check' is {determinism_check!r}, but it must "
                "be 'default' or 'none'. Pass one of them."
            )
        if not callable(context_fn) or hasattr(context_fn, "__enter__"):
            raise OptionError(
                f"ckpt_wrap.{by}: option 'context_fn' is {context_fn!r}, but it must be a function "
                "that returns two context managers. Pass such a function."
            )
        if checkpoint_fn is None and checkpoint_fn_options:
            raise OptionError(
                f"ckpt_wrap.{by}: option {next(iter(checkpoint_fn_options))!r} needs "
                "checkpoint_fn=, which receives it; options without it are "
                f"{', '.join(_defaults())}. For a policy of sac-policies, pass "
                "checkpoint_fn=sac_policies.checkpoint."
            )
        if checkpoint_fn is None and debug:
            raise OptionError(
                f"ckpt_wrap.{by}: option 'debug' is {debug!r}, but only torch's checkpoint prints "
                "the operators of both runs. Pass "
                "checkpoint_fn=torch.utils.checkpoint.checkpoint, use_reentrant=False with it."
            )
        if checkpoint_fn is not None and not callable(checkpoint_fn):
            raise OptionError(
                f"ckpt_wrap.{by}: option 'checkpoint_fn' is {checkpoint_fn!r}, but it must be a "
                "function called as checkpoint_fn(function, *args, **kwargs). Pass such a function."
            )

    def for_checkpoint_fn(self) -> dict[str, Any]:
        """Return its own options, and those of this package that differ from their default."""
        named = {name: getattr(self, name) for name in _defaults()}
        changed = {name: value for name, value in named.items() if value != _defaults()[name]}
        return {**changed, **self._others}


def _defaults() -> dict[str, Any]:
    """Return the keyword options of `CheckpointOptions`."""
    parameters = inspect.signature(CheckpointOptions).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Where saved tensors go, and which; `offload_` describes each option.

    Args:
        by: the called public function, for messages.

    Raises:
        OptionError: a value is invalid, or there is no such folder.
    """

    by: InitVar[str]
    _: KW_ONLY
    to: str | os.PathLike[str] = "cpu"
    min_bytes: int = 1024
    max_bytes_away: int | None = None

    def __post_init__(self, by: str) -> None:
        for name in ("min_bytes", "max_bytes_away"):
            value = getattr(self, name)
            if value is None and name == "max_bytes_away":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(
                    f"ckpt_wrap.{by}: option {name!r} is {value!r}, but it must be an int of at "
                    "least 0. Pass such a number."
                )
        if self.to == "cpu":
            return
        is_path = isinstance(self.to, (str, os.PathLike))
        # The process may change its working directory before backward, so the path is made
        # absolute.
        folder = os.path.abspath(os.path.expanduser(self.to)) if is_path else ""
        if not os.path.isdir(folder) or not self.to:
            raise OptionError(
                f"ckpt_wrap.{by}: option 'to' is {self.to!r}, but it must be 'cpu' for host "
                "memory, or the path of a folder that exists. Make the folder first."
            )
        object.__setattr__(self, "to", folder)


class InPlace(Protocol[P]):
    """Type of a function that changes a module and returns it."""

    def __call__(self, module: M, *args: P.args, **options: P.kwargs) -> M:
        """Change the module."""
        ...


def in_place_with(
    kind: Callable[Concatenate[str, P], Any],
) -> Callable[[Callable[..., Any]], InPlace[P]]:
    """Decorator: show the options of a class as parameters of a function that passes them on.

    The function keeps its first parameter. `help`, editors and type checkers show the rest.
    """
    return partial(_show_options, kind)


def wrapping_with(
    kind: Callable[Concatenate[str, P], Any],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[nn.Module, P], nn.Module]]:
    """Decorator: as `in_place_with`, for a function that returns a wrapper."""
    return partial(_show_options, kind)


def _show_options(kind: Callable[..., Any], function: Any) -> Any:
    _by, *options = inspect.signature(kind).parameters.values()
    own = inspect.signature(function)
    first = next(iter(own.parameters.values()))
    shown = own.replace(parameters=[first, *options])

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            shown.bind(*args, **given)
        except TypeError as error:  # it does not name the function
            raise TypeError(f"ckpt_wrap.{function.__name__}: {error}") from None
        return function(*args, **given)

    checked.__signature__ = shown  # type: ignore[attr-defined]
    return checked
