"""The options of checkpointing and of offload, validated when a module is wrapped."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap._errors import OptionError

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class CheckpointImpl(enum.Enum):
    """Which implementation recomputes.

    `NO_REENTRANT` records the graph in forward and recomputes saved tensors when they are read.
    `REENTRANT` runs forward without a graph and a whole backward inside backward.
    """

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


def _require_bools(options: object, names: tuple[str, ...], made_by: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise OptionError(
                f"ckpt_wrap.{made_by}: option {name!r} is {value!r}, but it must be a bool. "
                "Pass True or False."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How a module is checkpointed; the meaning is that of `torch.utils.checkpoint.checkpoint`."""

    impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT
    preserve_rng_state: bool = True
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True

    def require_valid(self, made_by: str) -> None:
        """Raise `OptionError` if a value is invalid, or two options conflict."""
        _require_bools(self, ("preserve_rng_state", "debug", "early_stop"), made_by)
        contexts = self.context_fn is not noop_context_fn
        reentrant = self.impl is CheckpointImpl.REENTRANT
        if not isinstance(self.impl, CheckpointImpl):
            reason = (
                f"option 'checkpoint_impl' is {self.impl!r}, but it must be a CheckpointImpl. "
                "Pass CheckpointImpl.NO_REENTRANT or CheckpointImpl.REENTRANT."
            )
        elif self.determinism_check not in ("default", "none"):
            reason = (
                f"option 'determinism_check' is {self.determinism_check!r}, but it must be "
                "'default' or 'none'. Pass one of them."
            )
        elif not callable(self.context_fn) or hasattr(self.context_fn, "__enter__"):
            reason = (
                f"option 'context_fn' is {self.context_fn!r}, but it must be a function that "
                "returns two context managers. Pass such a function."
            )
        elif reentrant and (contexts or self.debug):
            reason = (
                f"option {'context_fn' if contexts else 'debug'!r} is set with "
                "checkpoint_impl=CheckpointImpl.REENTRANT, but only NO_REENTRANT supports it. "
                "Leave one of the two out."
            )
        elif self.debug and contexts:
            reason = (
                "option 'debug' is True together with 'context_fn', but debug brings a context "
                "of its own. Pass only one of them."
            )
        else:
            return
        raise OptionError(f"ckpt_wrap.{made_by}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Where saved tensors go, and which; see `offload_`.

    Raises:
        OptionError: a value is invalid, or the folder does not exist and `create` is False.
    """

    to: str | os.PathLike[str] = "cpu"
    create: bool = False
    min_bytes: int = 1024
    keep_last: int = 0
    max_inflight_bytes: int | None = None
    max_bytes_away: int | None = None

    def __post_init__(self) -> None:
        _require_bools(self, ("create",), "offload_")
        for name in ("min_bytes", "keep_last", "max_inflight_bytes", "max_bytes_away"):
            value = getattr(self, name)
            if value is None and name.startswith("max_"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(
                    f"ckpt_wrap.offload_: option {name!r} is {value!r}, but it must be an int "
                    "of at least 0. Pass such a number."
                )
        # Two modules with the same folder have equal options, whichever of them created it.
        object.__setattr__(self, "to", self._place())
        object.__setattr__(self, "create", False)

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
        if not self.create and not os.path.exists(folder):
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {to!r}, but the folder must exist, so "
                "that a typo does not create one. Pass create=True to create it, or 'cpu' for "
                "host memory."
            )
        return folder

    @property
    def folder(self) -> Path | None:
        """The folder to use, or None for host memory."""
        return None if self.to == "cpu" else Path(self.to)


def _names_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
