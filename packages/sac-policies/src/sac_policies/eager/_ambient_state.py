"""The random state and autocast of a forward, restored for its recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

Autocast = tuple[bool, list[tuple[str, bool, torch.dtype]]]
"""Whether casts are cached; and for each kind of device: name, enabled, dtype."""


class AmbientState:
    """Random state and autocast.

    Args:
        inputs: tensors of the forward, for their devices.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._cpu: torch.Tensor | None = torch.get_rng_state()
        kinds = {each.device.type for each in inputs} - {"cpu", "meta"}
        self._kind = next(iter(kinds), "")
        self._kinds = ("cpu", *kinds)
        self._devices: Any = get_device_states(*inputs) if kinds else ([], [])
        self._autocast = _autocast(self._kinds)

    def settle(self) -> None:
        """Drop the CPU's random state if no number was drawn in forward."""
        if self._cpu is not None and torch.equal(self._cpu, torch.get_rng_state()):
            self._cpu = None

    def restored(self) -> AbstractContextManager[None]:
        """Restore both inside the block, and leave the current ones unchanged after it."""
        is_as_now = self._cpu is None and not self._devices[0]
        if is_as_now and self._autocast == _autocast(self._kinds):
            return nullcontext()
        return self._restored()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        ids, states = self._devices
        caches, kinds = self._autocast
        with ExitStack() as until:
            for kind, enabled, dtype in kinds:
                until.enter_context(torch.autocast(kind, dtype, enabled, caches))
            if self._cpu is not None or ids:
                forked = {"device_type": self._kind} if ids else {}
                until.enter_context(torch.random.fork_rng(ids, **forked))
                if self._cpu is not None:
                    torch.set_rng_state(self._cpu)
                if ids:
                    set_device_states(ids, states, device_type=self._kind)
            yield


def _autocast(kinds: tuple[str, ...]) -> Autocast:
    return torch.is_autocast_cache_enabled(), [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    ]
