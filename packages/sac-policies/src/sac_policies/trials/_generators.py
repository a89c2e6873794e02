"""The default random generators: torch's of each device, Python's, and NumPy's if it is used."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class Generators:
    """The states of the default generators at one time."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = [
            partial(torch.set_rng_state, torch.get_rng_state()),
            partial(random.setstate, random.getstate()),
        ]
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            module = getattr(torch, device.type)
            only_one = device.type == "mps"
            for at in [()] if only_one else [(n,) for n in range(module.device_count())]:
                self._undo.append(partial(module.set_rng_state, module.get_rng_state(*at), *at))
        numbers: Any = getattr(sys.modules.get("numpy"), "random", None)
        if numbers is not None:
            self._undo.append(partial(numbers.set_state, numbers.get_state()))

    def put_back(self) -> None:
        """Set the generators to these states."""
        for undo in self._undo:
            undo()
