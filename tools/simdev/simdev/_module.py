"""`torch.simdev`: the device module that torch and programs expect, and the controls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from ._graphs import Graphs
from ._knobs import Knobs

_Device = Any  # an index, a torch.device, its name, or None for the current device


class Stream(torch.Stream):
    """A stream of a device, from a pool as on CUDA."""

    def __new__(cls, device: _Device = None, priority: int = 0, **raw: Any) -> Stream:
        if "stream_id" in raw:
            return super().__new__(cls, **raw)
        index = torch.accelerator.current_device_index() if device is None else device
        return super().__new__(cls, torch.device("simdev", _index(index)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
    """Make an event; a function, since torch does not accept a subclass for elapsed times."""
    del blocking, interprocess
    return torch.Event(torch.device("simdev"), enable_timing=enable_timing)


def _index(device: _Device) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


@contextlib.contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    """Make a stream and its device current; None changes nothing."""
    if chosen is None:
        yield
        return
    with chosen:
        yield


def make_module(extension: Any) -> ModuleType:
    """Make the module from the extension."""

    @contextlib.contextmanager
    def device(chosen: _Device) -> Iterator[None]:
        old = extension.exchange_device(-1 if chosen is None else _index(chosen))
        try:
            yield
        finally:
            extension.set_device(old)

    def generator(device: _Device = None) -> torch.Generator:
        return extension.generator(_index(device))

    def manual_seed_all(seed: int) -> None:
        for index in range(extension.DEVICES):
            extension.generator(index).manual_seed(int(seed))

    def memory(name: str) -> Any:
        return lambda device=None: extension.memory(_index(device))[name]

    made = ModuleType("torch.simdev", "A simulated accelerator, see `simdev`.")
    offered: dict[str, Any] = {
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: extension.DEVICES,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(_index(device)),
        "device": device,
        "get_device_name": lambda device=None: "simulated",
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(
            torch.device("simdev", _index(device))
        ),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: extension.synchronize(_index(device)),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state) and None,
        "manual_seed": lambda seed: generator().manual_seed(int(seed)) and None,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: generator().initial_seed(),
        "memory_allocated": memory("allocated"),
        "max_memory_allocated": memory("allocated_peak"),
        "memory_reserved": memory("reserved"),
        "max_memory_reserved": memory("reserved_peak"),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peaks(_index(device)),
        "empty_cache": extension.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
    }
    made.__dict__.update(offered)
    knobs = Knobs(extension)
    made.__dict__.update(knobs.offered())
    made.__dict__.update(Graphs(extension, knobs.synchronize_all).offered())
    return made
