"""Ambient state of a forward, replayed in recomputation.

The random state of the CPU and of every device an input lives on, autocast, and the default device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_wrap._torch_compat import may_have_function_mode

Autocast = tuple[str, bool, torch.dtype, bool]


@dataclass(frozen=True, slots=True)
class AmbientState:
    """State around one forward; `rng` is empty where random state is not preserved."""

    rng: tuple[tuple[torch.device, torch.Tensor], ...]
    autocast: tuple[Autocast, ...]
    default_device: torch.device | None


_CPU = torch.device("cpu")


def capture(tensors: Iterable[torch.Tensor], *, preserve_rng_state: bool) -> AmbientState:
    """The state a forward over these tensors is about to start from."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu and not tensor.is_meta}
    return AmbientState(
        rng=_rng_states(devices) if preserve_rng_state else (),
        autocast=tuple([_autocast(kind) for kind in _device_types(devices)]),
        default_device=torch.get_default_device() if may_have_function_mode() else None,
    )


@contextlib.contextmanager
def replay(ambient: AmbientState) -> Iterator[None]:
    """Run the body as if it were the forward, then put everything back."""
    now = _rng_states([device for device, _ in ambient.rng if device.type != "cpu"])
    with contextlib.ExitStack() as stack:
        if ambient.rng:
            stack.callback(_set_rng_states, now)
            _set_rng_states(ambient.rng)
        for wanted in ambient.autocast:
            _enter_autocast(stack, wanted)
        if ambient.default_device is not None:
            stack.enter_context(ambient.default_device)
        yield


def _rng_states(
    devices: Iterable[torch.device],
) -> tuple[tuple[torch.device, torch.Tensor], ...]:
    states = [(_CPU, torch.default_generator.get_state())]
    for device in devices:
        api = torch.get_device_module(device)
        states.append((device, api.get_rng_state(*_which(device))))
    return tuple(states)


def _set_rng_states(states: Iterable[tuple[torch.device, torch.Tensor]]) -> None:
    for device, state in states:
        if device.type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one mps device, and its functions take no name for it.
    return () if device.type == "mps" else (device,)


@functools.cache
def _accelerator_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return ("cpu", accelerator.type)


def _device_types(devices: set[torch.device]) -> tuple[str, ...]:
    known = _accelerator_types()
    if not devices:
        return known
    others = {device.type for device in devices}.difference(known)
    return known + tuple(kind for kind in others if torch.amp.is_autocast_available(kind))


def _autocast(device_type: str) -> Autocast:
    return (
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def _enter_autocast(stack: contextlib.ExitStack[Any], wanted: Autocast) -> None:
    device_type, enabled, dtype, cache = wanted
    if not enabled and not torch.is_autocast_enabled(device_type):
        return
    stack.enter_context(
        torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache)
    )
