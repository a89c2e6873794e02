"""`watch_memory`: a page about live memory, on request, above a limit, or when it runs out."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import is_grad_enabled, nn

from .._attribution import Attribution
from .._edges import tensors_in
from .._errors import OptionError, check_int
from .._events import Listener
from .._record import root_of
from .._torch_compat import NO_TASK, graph_task, on_out_of_memory
from .._tracker import ModTracker
from ._allocations import (
    AllocationMode,
    DeviceMemory,
    Place,
    check_optimizer,
    measuring_storages,
    storages_of,
)
from ._allocator import allocators
from ._holders import what_is_held
from ._memory_page import MemoryPage, tensor_shown
from ._report import UNSEEN_BYTES, notes_on_compiled, reporting
from ._rows import bytes_shown

_log = logging.getLogger("mod_tracker")


Limit = int | Mapping[str, int] | None
"""Bytes of each device, or of devices by name."""


class MemoryWatch:
    """Tracks live memory and the modules that allocated it.

    Attributes:
        pages: pages written so far, above the limit and when memory ran out.
    """

    def __init__(
        self,
        tracker: ModTracker,
        optimizer: torch.optim.Optimizer | None,
        limit_bytes: Limit = None,
    ) -> None:
        self._limit = limit_bytes
        self.pages: list[MemoryPage] = []
        self._tracker, self._optimizer = tracker, optimizer
        above = None if limit_bytes is None else self._above
        self._mode = AllocationMode(self._attribution, changed=above, lines=True)
        self._given: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._steps = 0
        self._thread = threading.get_ident()
        self._since: Counter[Place] = Counter()
        self._grown: dict[Place, int] = {}
        self._inputs: tuple[str, ...] = ()
        self._observed: MemoryPage | None = None

    @property
    def _attribution(self) -> Attribution:
        return self._tracker._attribution

    def page(self, reason: str = "asked", *, device: str = "") -> MemoryPage:
        """Return a page about the memory alive now. Slow: it visits every Python object.

        Args:
            reason: first line of the page.
            device: device that the page is about; see `MemoryPage.device`.

        Raises:
            OptionError: nothing is on that device.
        """
        page = self._page(reason)
        return page.on(device) if device else page

    def _page(self, reason: str, device: str = "") -> MemoryPage:
        held = what_is_held(self._mode, self._tracker.roots, self._optimizer, self._given)
        call, phase = self._attribution.locate()
        return MemoryPage(
            reason,
            held,
            self._grown,
            self._steps,
            self._inputs,
            notes_on_compiled(self._attribution, UNSEEN_BYTES, self._mode.compiled_in),
            running=f"{phase} of {call[0].name}" if call[0].name else "",
            allocators=allocators(held),
            device=device if any(each.device == device for each in held) else "",
        )

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step at a call of a root module, after a backward or without gradients."""
        call = self._attribution.locate()[0]
        is_root = call is root_of(call)
        if not is_root or graph_task() != NO_TASK or threading.get_ident() != self._thread:
            return
        if self._steps == 0 or self._mode.went_back or not is_grad_enabled():
            self._mode.went_back = False
            self._steps += 1
            self._begin_step(tensors_in((args, kwargs)))

    def _begin_step(self, given: list[torch.Tensor]) -> None:
        alive = self._mode.by_line()
        if self._steps > 1:
            self._grown = dict(alive - self._since)
        self._since, self._observed = alive, None
        self._given = {id(storage): weakref.ref(storage) for _, storage in storages_of(given)}
        self._inputs = (", ".join(map(tensor_shown, given)), *self._inputs[:1])

    def _above(self, memory: DeviceMemory) -> None:
        """Write a page the first time that the live bytes of a device exceed its limit."""
        limit = self._limit
        if isinstance(limit, Mapping):
            limit = limit.get(memory.device)
        if limit is not None and memory.live > limit and not self.pages:
            live, most = bytes_shown(memory.live), bytes_shown(limit)
            self.write(f"{live} on {memory.device} is above the limit of {most}", memory.device)

    def _ran_out_on(self, device: int, asked: int, free: int) -> None:
        """Write a page when CUDA has no memory left, before torch raises; at most one per step."""
        if self._observed is None:
            wanted = f"{bytes_shown(asked)} requested, {bytes_shown(free)} free"
            name = f"cuda:{device}"
            self._observed = self.write(f"memory ran out on {name}, {wanted}", name)

    def _ran_out(self, error: BaseException) -> None:
        """Write a page for an error, unless the CUDA observer wrote it, and add it to the error."""
        page = self._observed or self.write(f"memory ran out ({type(error).__name__})")
        if hasattr(error, "add_note"):
            error.add_note(str(page))

    def write(self, reason: str, device: str = "") -> MemoryPage:
        """Log a page and add it to `pages`."""
        page = self._page(reason, device)
        self.pages.append(page)
        _log.warning("%s", page)
        return page


@reporting
def watch_memory(
    *roots: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    limit_bytes: Limit = None,
) -> Iterator[MemoryWatch]:
    """Write a page about live memory: on request, above a limit, and when memory runs out.

    Can stay on around a training loop. It sees every allocation, and costs as much as
    `profile_memory`. On CUDA the page also shows the allocator's reserved memory, and the modules
    that keep it fragmented.

    When memory runs out the page is logged and added to `MemoryWatch.pages`. On CUDA it is written
    before torch raises, also if your code catches the error. On other devices it is written when
    the error leaves the block. An error that leaves the block has the page as a note (Python 3.11
    and later). A page reads the models of all threads, so other threads must not train meanwhile.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        optimizer: optimizer whose state to show.
        limit_bytes: write a page when the live bytes of a device, of those allocated in the block,
            first exceed this. A dict from devices to bytes limits each device by itself.

    Raises:
        OptionError: `limit_bytes` is not a positive int, or a dict from devices to such ints, or
            `optimizer` has no state.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> with watch_memory(model) as watch:
        ...     loss = model(torch.ones(1, 4)).sum()
        ...     page = watch.page()
        >>> page.by_kind()["parameters"], page.by_kind()["inputs"]
        (232, 16)
    """
    check_optimizer(optimizer, "watch_memory")
    limit = _checked(limit_bytes)
    with ModTracker(*roots) as tracker:
        watch = MemoryWatch(tracker, optimizer, limit)
        end_observing = on_out_of_memory(watch._ran_out_on)
        try:
            with (
                tracker._listening(Listener(pre_forward=watch._called)),
                watch._mode.following_optimizers(),
                measuring_storages(watch._mode),
            ):
                yield watch
        except BaseException as error:
            if is_out_of_memory(error):
                watch._ran_out(error)
            raise
        finally:
            end_observing()


def _checked(limit: Any) -> Limit:
    """Return a limit with devices by full names.

    Raises:
        OptionError: it is no limit.
    """
    if not isinstance(limit, Mapping):
        check_int("watch_memory", "limit_bytes", limit, 1, or_none="no limit")
        checked: Limit = limit
        return checked
    by_name = {}
    for device, size in limit.items():
        check_int("watch_memory", f"limit_bytes[{device!r}]", size, 1)
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError):
            raise OptionError(
                f"mod_tracker.watch_memory: a key of limit_bytes must be a device such as 'cuda:0' "
                f"or 'cpu'; got {device!r}."
            ) from None
        index = "" if place.type in ("cpu", "meta") else f":{place.index or 0}"
        by_name[f"{place.type}{index}"] = size
    return by_name


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "not enough memory" in text or "can't allocate memory" in text
    )
