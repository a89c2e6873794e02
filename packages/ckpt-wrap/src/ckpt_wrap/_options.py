"""The options of checkpointing and of offload, validated when a module is wrapped."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

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
        if self.to == "cpu":
            return
        is_path = isinstance(self.to, (str, os.PathLike))
        # The process may change its working directory before backward, so the path is made
        # absolute.
        folder = os.path.abspath(os.path.expanduser(self.to)) if is_path else ""
        if not os.path.isdir(folder) or not self.to:
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {self.to!r}, but it must be 'cpu' for host "
                "memory, or the path of a folder that exists. Make the folder first."
            )
        object.__setattr__(self, "to", folder)
