"""Helpers for faults of the area ckpt-wrap: a part with one method replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchparts_conformance.mutants import overlay

INNER = "_checkpoint_wrapped_module"

PREFIX = INNER + "."


def faulty(part: Any, **names: Any) -> Any:
    """The part with a CheckpointWrapper that has some methods replaced."""
    kind = type("CheckpointWrapper", (part.CheckpointWrapper,), names)
    kind.__module__, kind.__qualname__ = __name__, "FaultyCheckpointWrapper"
    globals()["FaultyCheckpointWrapper"] = kind  # pickle looks it up here

    def make(
        module, checkpoint_impl=part.CheckpointImpl.NO_REENTRANT, checkpoint_fn=None, **options
    ):
        return kind(module, checkpoint_impl, checkpoint_fn, **options)

    return overlay(part, checkpoint_wrapper=make, CheckpointWrapper=kind)


def faulty_call(part: Any, change: Callable[..., Any]) -> Any:
    """The part with `change(wrapper, call, args, kwargs)` instead of a wrapper's forward."""
    working = part.CheckpointWrapper.forward

    def forward(self, *args, **kwargs):
        return change(self, functools.partial(working, self), args, kwargs)

    return faulty(part, forward=forward)


def faulty_options(part: Any, change: Callable[..., Any]) -> Any:
    """The part with `change(arguments)` applied to the arguments of `checkpoint_wrapper`."""
    working = part.checkpoint_wrapper

    def make(
        module, checkpoint_impl=part.CheckpointImpl.NO_REENTRANT, checkpoint_fn=None, **options
    ):
        module, impl, fn, options = change(module, checkpoint_impl, checkpoint_fn, options)
        return working(module, impl, fn, **options)

    return overlay(part, checkpoint_wrapper=make)


def faulty_offload(part: Any, change: Callable[..., Any]) -> Any:
    """The part with `change(call, args, kwargs)` instead of an OffloadWrapper's forward."""
    working = part.OffloadWrapper.forward

    def forward(self, *args, **kwargs):
        return change(functools.partial(working, self), args, kwargs)

    kind = type("OffloadWrapper", (part.OffloadWrapper,), {"forward": forward})
    return overlay(part, offload_wrapper=kind, OffloadWrapper=kind)


def faulty_apply(part: Any, change: Callable[..., Any]) -> Any:
    """The part with `change(working, model, wrapper_fn, options)` instead of the apply function."""
    working = part.apply_activation_checkpointing

    def apply(model, checkpoint_wrapper_fn=part.checkpoint_wrapper, **options):
        return change(working, model, checkpoint_wrapper_fn, options)

    return overlay(part, apply_activation_checkpointing=apply)


def is_reentrant(wrapper: Any) -> bool:
    """Whether a wrapper recomputes reentrantly."""
    return wrapper.checkpoint_impl.name == "REENTRANT"
