"""The options of checkpointing, validated when a module is wrapped."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap._errors import ModuleError, OptionError

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class CheckpointImpl(enum.Enum):
    """Which implementation recomputes.

    `NO_REENTRANT` records the graph in forward and recomputes saved tensors when they are read.
    `REENTRANT` runs forward without a graph and a whole backward inside backward.
    """

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How a module is checkpointed; the meaning is that of `torch.utils.checkpoint.checkpoint`.

    Raises:
        OptionError: a value is invalid, or two options conflict.
    """

    impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT
    preserve_rng_state: bool = True
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True

    def __post_init__(self) -> None:
        reason = self._reason()
        if reason:
            raise OptionError(reason)

    def _reason(self) -> str:
        if not isinstance(self.impl, CheckpointImpl):
            return (
                f"option 'checkpoint_impl' is {self.impl!r}, but it must be a CheckpointImpl. "
                "Pass CheckpointImpl.NO_REENTRANT or CheckpointImpl.REENTRANT."
            )
        for name in ("preserve_rng_state", "debug", "early_stop"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                return f"option {name!r} is {value!r}, but it must be a bool. Pass True or False."
        if self.determinism_check not in ("default", "none"):
            return (
                f"option 'determinism_check' is {self.determinism_check!r}, but it must be "
                "'default' or 'none'. Pass one of them."
            )
        if not callable(self.context_fn):
            return (
                f"option 'context_fn' is {self.context_fn!r}, but it must be a function that "
                "returns two context managers. Pass such a function."
            )
        contexts = self.context_fn is not noop_context_fn
        if self.impl is CheckpointImpl.REENTRANT and (contexts or self.debug):
            name = "context_fn" if contexts else "debug"
            return (
                f"option {name!r} is set with checkpoint_impl=CheckpointImpl.REENTRANT, but only "
                "NO_REENTRANT supports it. Leave one of the two out."
            )
        if self.debug and contexts:
            return (
                "option 'debug' is True together with 'context_fn', but debug brings a context "
                "of its own. Pass only one of them."
            )
        return ""


def require_module(value: object, function: str) -> None:
    """Raise `ModuleError` unless `value` is an `nn.Module` that has been initialised."""
    if not isinstance(value, nn.Module):
        raise ModuleError(
            f"ckpt_wrap.{function}: module is {value!r} of type {type(value).__name__}, but it "
            "must be an nn.Module. Pass the module itself."
        )
    if not hasattr(value, "_modules"):
        raise ModuleError(
            f"ckpt_wrap.{function}: module of class {type(value).__name__} is not initialised, "
            "but nn.Module.__init__ must have run. Call super().__init__() in its __init__."
        )
