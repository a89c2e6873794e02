"""The options of checkpointing and of offload, validated when a module is wrapped."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap._errors import OptionError

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class CheckpointImpl(enum.Enum):
    """The two implementations of torch's checkpoint, for code that names them.

    Here both mean the same: forward records the graph, and backward recomputes saved tensors when
    they are read. It does all that torch's reentrant implementation does.
    """

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How a module is checkpointed; the meaning is that of `torch.utils.checkpoint.checkpoint`."""

    preserve_rng_state: bool = True
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    early_stop: bool = True

    def __post_init__(self) -> None:
        for name in ("preserve_rng_state", "early_stop"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(
                    f"ckpt_wrap.checkpoint_: option {name!r} is {value!r}, but it must be a bool. "
                    "Pass True or False."
                )
        if self.determinism_check not in ("default", "none"):
            raise OptionError(
                f"ckpt_wrap.checkpoint_: option 'determinism_check' is {self.determinism_check!r}, "
                "but it must be 'default' or 'none'. Pass one of them."
            )
        if not callable(self.context_fn) or hasattr(self.context_fn, "__enter__"):
            raise OptionError(
                f"ckpt_wrap.checkpoint_: option 'context_fn' is {self.context_fn!r}, but it must "
                "be a function that returns two context managers. Pass such a function."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Where saved tensors go, and which; see `offload_`."""

    to: str | os.PathLike[str] = "cpu"
    min_bytes: int = 1024
    max_bytes_away: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_bytes", "max_bytes_away"):
            value = getattr(self, name)
            if value is None and name == "max_bytes_away":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(
                    f"ckpt_wrap.offload_: option {name!r} is {value!r}, but it must be an int "
                    "of at least 0. Pass such a number."
                )
        object.__setattr__(self, "to", self._place())

    def _place(self) -> str:
        to = os.fspath(self.to) if isinstance(self.to, os.PathLike) else self.to
        if not isinstance(to, str) or not to:
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {self.to!r}, but it must be 'cpu' or the "
                "path of a folder. Pass one of them."
            )
        if to == "cpu":
            return to
        if _names_device(to):
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {to!r}, but offload goes to 'cpu' or to a "
                f"folder. Pass './{to}' if you mean a folder."
            )
        # The process may change its working directory before backward.
        folder = os.path.abspath(os.path.expanduser(to))
        if not os.path.isdir(folder):
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {to!r}, but there is no such folder. Make "
                "the folder first, or pass 'cpu' for host memory."
            )
        return folder


def _names_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
