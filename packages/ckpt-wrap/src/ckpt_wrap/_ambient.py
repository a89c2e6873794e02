"""Whether this thread runs a checkpointed module, and the state that recomputation restores.

The ambient state is the random state of the CPU and of every device of an input, autocast, and the
default device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ckpt_wrap._torch_compat import may_have_function_mode


class _Phase(threading.local):
    runs = 0  # counts forwards and recomputations of checkpointed modules that are running
    recomputations = 0


_phase = _Phase()


def is_recomputing() -> bool:
    """Whether the current thread is running a checkpointed module again, for its backward.

    For logs and counters, also counters in buffers that forward does not read. Always False in
    compiled code, which is the same in both runs.

    Buffers need no guard. Do not guard a write to a buffer that the same forward reads later:
    recomputation skips the write, reads the old value, and gradients are wrong without an error.
    An error would refuse counters as well, because the buffers that a forward reads are not known.

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


RngStates = tuple[tuple[torch.device | torch.Generator, torch.Tensor], ...]


class AmbientState(NamedTuple):
    """State around one forward; `rng` is empty if random state is not preserved."""

    rng: RngStates
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    default_device: torch.device | None


def capture(
    tensors: Iterable[torch.Tensor],
    generators: Iterable[torch.Generator],
    *,
    preserve_rng_state: bool,
) -> AmbientState:
    """Return the state before a forward with these tensors and generators."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu and not tensor.is_meta}
    cache = torch.is_autocast_cache_enabled()
    return AmbientState(
        rng=_rng_states([*devices, *generators]) if preserve_rng_state else (),
        autocast=tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
            for kind in _device_types(devices)
        ),
        default_device=torch.get_default_device() if may_have_function_mode() else None,
    )


@contextlib.contextmanager
def replay(ambient: AmbientState) -> Iterator[None]:
    """Run the body in this state, then restore the present one."""
    now = _rng_states(source for source, _ in ambient.rng[1:])
    with contextlib.ExitStack() as stack:
        if ambient.rng:
            stack.callback(_set_rng_states, now)
            _set_rng_states(ambient.rng)
        for kind, enabled, dtype, cache in ambient.autocast:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
        if ambient.default_device is not None:
            stack.enter_context(ambient.default_device)
        yield


_CPU = torch.device("cpu")


def _rng_states(sources: Iterable[torch.device | torch.Generator]) -> RngStates:
    """Return the random state of the CPU, then those of other devices and of generators."""
    states: list[Any] = [(_CPU, torch.default_generator.get_state())]
    for source in sources:
        if isinstance(source, torch.Generator):
            states.append((source, source.get_state()))
        else:
            api = torch.get_device_module(source)
            states.append((source, api.get_rng_state(*_which(source))))
    return tuple(states)


def _set_rng_states(states: RngStates) -> None:
    for source, state in states:
        if isinstance(source, torch.Generator):
            source.set_state(state)
        elif source == _CPU:
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(source).set_rng_state(state, *_which(source))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one mps device, and its functions take no device argument.
    return () if device.type == "mps" else (device,)


@functools.cache
def _accelerator_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return ("cpu", accelerator.type)


def _device_types(devices: set[torch.device]) -> Iterator[str]:
    known: Any = _accelerator_types()
    yield from known
    for kind in {device.type for device in devices}.difference(known):
        if torch.amp.is_autocast_available(kind):
            yield kind
