"""Whether this thread runs a checkpointed module, and the state that recomputation restores.

The ambient state is the random state of torch, Python and NumPy and of every device of an input,
autocast, and the default device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ckpt_wrap._random import Source, sources
from ckpt_wrap._torch_compat import may_have_function_mode


class _Phase(threading.local):
    runs = 0  # counts forwards and recomputations of checkpointed modules that are running
    recomputations = 0


_phase = _Phase()


def is_recomputing() -> bool:
    """Whether the current thread is running a checkpointed module again, for its backward.

    For output and for objects outside of modules. Attributes and buffers of modules need no guard:
    what recomputation writes to them is put back. Always False in compiled code, which is the same
    in both runs.

    Do not guard a write to state that the same forward reads later: recomputation skips the write,
    reads the old value, and gradients are wrong without an error.

    Returns:
        True in recomputation, also in functions that the module calls. False in forward, in
        backward itself, and in other threads.

    Example:
        >>> is_recomputing()
        False
    """
    return not torch.compiler.is_compiling() and _phase.recomputations > 0


def is_checkpointing() -> bool:
    """Whether this thread runs a checkpointed module, for the first time or again.

    Tensors that autograd saves there are not kept for backward.
    """
    return _phase.runs > 0


@contextlib.contextmanager
def running(*, again: bool) -> Iterator[None]:
    """Context of a checkpointed forward, or of its recomputation."""
    _phase.runs += 1
    _phase.recomputations += again
    try:
        yield
    finally:
        _phase.runs -= 1
        _phase.recomputations -= again


class AmbientState(NamedTuple):
    """State around one forward; `random` is empty if random state is not preserved."""

    random: tuple[tuple[Source, Any], ...]
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    default_device: torch.device | None


def capture(
    tensors: Iterable[torch.Tensor], generators: Iterable[Any], *, preserve_rng_state: bool
) -> AmbientState:
    """Return the state before a forward with these tensors and generators."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu and not tensor.is_meta}
    cache = torch.is_autocast_cache_enabled()
    found = sources(devices, generators) if preserve_rng_state else []
    kinds = _accelerator_types()
    if devices:
        present = filter(torch.amp.is_autocast_available, {device.type for device in devices})
        kinds = tuple(dict.fromkeys((*kinds, *present)))
    return AmbientState(
        random=tuple([(source, source.state()) for source in found]),
        autocast=tuple(
            [
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
                for kind in kinds
            ]
        ),
        default_device=torch.get_default_device() if may_have_function_mode() else None,
    )


@contextlib.contextmanager
def replay(ambient: AmbientState) -> Iterator[None]:
    """Run the body in this state, then restore the present one."""
    now = [(source, source.state()) for source, _ in ambient.random]
    contexts: list[AbstractContextManager[Any]] = [
        torch.autocast(kind, dtype, enabled, cache)
        for kind, enabled, dtype, cache in ambient.autocast
        if enabled or torch.is_autocast_enabled(kind)
    ]
    if ambient.default_device is not None:
        contexts.append(ambient.default_device)
    try:
        for (source, state), (_, present) in zip(ambient.random, now, strict=True):
            if state is not present:
                source.set_state(state)
        if contexts:
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield
        else:
            yield
    finally:
        for source, present in now:
            source.set_state(present)


@functools.cache
def _accelerator_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return ("cpu", accelerator.type)
