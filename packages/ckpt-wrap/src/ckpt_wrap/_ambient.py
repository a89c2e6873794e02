"""Whether this thread runs a checkpointed module, and the ambient state that a run repeats.

The ambient state is the random state of the CPU and of every device an input lives on, autocast,
and the default device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ckpt_wrap._torch_compat import may_have_function_mode


class Asked(Protocol):
    """State of a forward that remembers whether the forward called `is_recomputing()`."""

    asked: bool


class _Phase(threading.local):
    recomputing = 0
    runs: tuple[Asked, ...] = ()  # of the forwards that are running


_phase = _Phase()


def is_recomputing() -> bool:
    """Whether the current thread is running a checkpointed module again, for its backward.

    Always False in compiled code, which is the same in both runs.

    Example:
        >>> is_recomputing()
        False
    """
    if torch.compiler.is_compiling():
        return False
    for run in _phase.runs:
        run.asked = True
    return _phase.recomputing > 0


def is_checkpointing() -> bool:
    """Whether the current thread is running a checkpointed module, for the first time or again.

    Tensors that autograd saves there are not kept for backward. Outside a checkpointed module, and
    in one that is called without gradients, this is False.

    Example:
        >>> is_checkpointing()
        False
    """
    return bool(_phase.runs) or _phase.recomputing > 0


@contextlib.contextmanager
def first_run(run: Asked) -> Iterator[None]:
    """Context of a checkpointed forward: `run.asked` is set when it calls `is_recomputing()`."""
    outer = _phase.runs
    _phase.runs = (run, *outer)
    try:
        yield
    finally:
        _phase.runs = outer


@contextlib.contextmanager
def second_run() -> Iterator[None]:
    """Context of a recomputation."""
    _phase.recomputing += 1
    try:
        yield
    finally:
        _phase.recomputing -= 1


RngStates = tuple[tuple[torch.device | torch.Generator, torch.Tensor], ...]


class AmbientState(NamedTuple):
    """State around one forward; `rng` is empty where random state is not preserved."""

    rng: RngStates
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    default_device: torch.device | None


def capture(
    tensors: Iterable[torch.Tensor],
    generators: Iterable[torch.Generator],
    *,
    preserve_rng_state: bool,
) -> AmbientState:
    """The state a forward over these tensors and generators is about to start from."""
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
    """Run the body as if it were the forward, then put everything back."""
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
    """The random state of the CPU, and then those of other devices and of generators."""
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
    # There is one mps device, and its functions take no name for it.
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
