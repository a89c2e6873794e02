"""Who holds the memory, in a run that goes on - when asked, above a limit, or when it runs out."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .._edges import tensors_in
from .._errors import OptionError
from .._listeners import Callbacks, Filter
from .._numbers import bytes_shown
from .._subscription import Subscription
from .._torch_compat import SavedHooks, on_out_of_memory
from .._tracker import ModTracker, tracking
from ._allocations import AllocationMode, KeptTensor, check_optimizer
from ._compiled import compiled_notes
from ._holders import Ledger
from ._memory_page import MemoryPage, tensor_shown
from ._steps import Look, Steps, by_shapes, closed_twice

_log = logging.getLogger("mod_tracker")

FIRST_COUNT = 8
"""Steps after which everything is counted for the first time, where there is a limit."""


class MemoryWatch:
    """Knows what is alive and which module made it.

    Attributes:
        pages: pages written so far: above the limit, and when memory ran out.
    """

    def __init__(
        self,
        tracker: ModTracker,
        optimizer: torch.optim.Optimizer | None,
        limit_bytes: int | None = None,
    ) -> None:
        self._limit = limit_bytes
        self._counts: list[tuple[int, int]] = []
        self._next_count = FIRST_COUNT
        self._before = 0
        self.pages: list[MemoryPage] = []
        self.ledger: Ledger = Ledger()
        self._tracker, self._optimizer = tracker, optimizer
        self._steps: Steps | None = None
        self._since: dict[tuple[str, str], int] = {}
        self._grown: dict[tuple[str, str], int] = {}
        self._inputs: tuple[str, ...] = ()
        self._observed: MemoryPage | None = None

    def page(self, reason: str = "asked") -> MemoryPage:
        """Return what holds the memory now. Takes as long as visiting every Python object."""
        steps = self._steps
        held = self.ledger.held(self._tracker.roots, self._optimizer)
        counted = (0, 0) if steps is None else (steps.begun, steps.looked_at)
        notes = compiled_notes(self._tracker._attribution, bytes_missing=True)
        call, phase = self._tracker._attribution.locate()
        running = f"{phase} of {call[0].name}" if call[0].name else ""
        return MemoryPage(reason, held, self._grown, counted, self._inputs, notes, running)

    def follow(self, steps: Steps) -> None:
        """Use the step numbers of this object."""
        self._steps = steps

    def begin_step(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what is alive where a step begins, and its inputs; return the kind of step."""
        alive = self.ledger.by_line()
        if self._steps is not None and self._steps.looks:
            # Of other steps only what was freed is known: what they left behind was not seen.
            grown = Counter(alive)
            grown.subtract(self._since)
            self._grown = {place: size for place, size in grown.items() if size > 0}
        self._since, self._observed = alive, None
        self._count(sum(alive.values()))
        given = tensors_in((args, kwargs))
        self.ledger.given(given)
        self._inputs = (", ".join(map(tensor_shown, given)), *self._inputs[:1])
        return by_shapes(module, args, kwargs)

    def _above(self, live: int) -> None:
        """Write a page the first time that more than the limit is alive."""
        if self._limit is not None and live > self._limit and not self.pages:
            self.write(self._reason(live))

    def _reason(self, live: int) -> str:
        return f"{bytes_shown(live)} is above the limit of {bytes_shown(self._limit or 0)}"

    def _count(self, seen: int) -> None:
        """See whether what nobody saw being made goes above the limit, in a few steps only.

        Counting takes as long as a page. So after that the number of steps is doubled, unless at
        the rate so far the limit is nearer: then half the way to it is gone, but 3 % at the least.
        """
        number = 0 if self._steps is None else self._steps.begun
        if self._limit is None or self.pages or number < self._next_count:
            return
        page = self.page()
        if not self._counts:
            self._before = page.total - seen  # what is not of this block
        live = page.total - self._before
        further = number
        if self._counts:
            before, held = self._counts[-1]
            if live > held:
                steps_left = (self._limit - live) * (number - before) // (live - held)
                further = min(number, max(steps_left // 2, number // 32, 1))
        self._counts.append((number, live))
        self._next_count = number + further
        if live > self._limit:
            self._keep(replace(page, reason=self._reason(live)))

    def _ran_out_on(self, device: int, asked: int, free: int) -> None:
        """Write a page while torch looks for memory, before there is an error; one in a step."""
        if self._observed is None:
            wanted = f"{bytes_shown(asked)} were asked for where {bytes_shown(free)} are free"
            self._observed = self.write(f"memory ran out on cuda:{device}, {wanted}")

    def _ran_out(self, error: BaseException) -> None:
        """Write the page of an error, once, unless torch told of it before; give it to the error.

        It is met at every outermost call that it goes through, and where the block is left.
        """
        pages = error.__dict__.setdefault("mod_tracker_pages", {})
        if id(self) in pages:
            return
        page, self._observed = self._observed, None
        if page is None:
            page = self.write(f"memory ran out ({type(error).__name__})")
        pages[id(self)] = page
        if hasattr(error, "add_note"):
            error.add_note(str(page))

    def _has_left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """See whether an outermost call was left because memory ran out."""
        error = sys.exc_info()[1] if output is None else None
        if error is not None and is_out_of_memory(error):
            self._ran_out(error)

    def write(self, reason: str) -> MemoryPage:
        """Write a page to the log, and keep it."""
        return self._keep(self.page(reason))

    def _keep(self, page: MemoryPage) -> MemoryPage:
        self.pages.append(page)
        _log.warning("%s", page)
        return page


def _unpack(kept: KeptTensor) -> torch.Tensor:
    return kept.given_back("watch_memory")


@contextmanager
def watch_memory(
    *roots: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    limit_bytes: int | None = None,
    every_step: bool = False,
) -> Iterator[MemoryWatch]:
    """Say on one page who holds the memory: when asked, above a limit, and when it runs out.

    Made to be left on. Allocations are looked at in a few steps only, as by `profile_memory`: the
    first ones, those with other shapes than any before, and fewer and fewer of those alike. A
    step that is looked at takes several times as long, others nothing. What was made in the
    others is found where Python holds it, without the line that made it.

    When memory runs out the page is logged and kept in `MemoryWatch.pages`, and the error goes on;
    with Python 3.11 and later it has the page as a note. On CUDA torch tells of it before it
    raises. Elsewhere the page is written as the error leaves an outermost module or the block, also
    if your code catches it above the module, with what its frames still hold; of an error of a
    backward that is caught inside the block there is a page on CUDA only.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        optimizer: whose state to name.
        limit_bytes: write a page the first time when more than this is alive of what was made in
            the block. In steps that are looked at, at once. What others leave behind is counted
            at the beginning of a few of them, the nearer to the limit the oftener, so a leak is
            told of within a thirtieth of the steps that it took.
        every_step: look at every step.

    Raises:
        OptionError: `limit_bytes` is no positive int, or `optimizer` has no state to read.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> with watch_memory(model) as watch:
        ...     loss = model(torch.ones(1, 4)).sum()
        ...     page = watch.page()
        >>> page.by_kind()["parameters"], page.inside("saved")["Sequential.1"]
        (232, 32)
    """
    check_optimizer(optimizer, "watch_memory")
    if limit_bytes is not None and not isinstance(limit_bytes, int):
        raise OptionError(
            f"mod_tracker.watch_memory: limit_bytes {limit_bytes!r} is a "
            f"{type(limit_bytes).__name__}, but it is a number of bytes. Write 2**30 for a GiB."
        )
    if limit_bytes is not None and limit_bytes <= 0:
        raise OptionError(
            f"mod_tracker.watch_memory: limit_bytes {limit_bytes} is too small, but it must be "
            "positive. Leave it out for no limit."
        )
    with ExitStack() as stack:
        tracker = stack.enter_context(tracking(*roots))
        watch = MemoryWatch(tracker, optimizer, limit_bytes)
        ledger = watch.ledger
        above = None if limit_bytes is None else watch._above
        mode = AllocationMode(tracker._attribution, changed=above, ledger=ledger)
        look = Look(mode, partial(SavedHooks, ledger.pack, _unpack), ledger.pack)
        steps = Steps(look, kind=watch.begin_step, every=lambda: every_step)
        watch.follow(steps)
        stack.enter_context(closed_twice(partial(look.close, anyway=True)))
        look.start()
        stack.enter_context(steps.listen(tracker))
        left = Subscription()
        leaves = Callbacks(post_forward=left.guard(watch._has_left))
        stack.enter_context(left.starts(tracker._listen(leaves, Filter(max_depth=1))))
        stack.callback(on_out_of_memory(watch._ran_out_on))
        try:
            yield watch
        except BaseException as error:
            if is_out_of_memory(error):
                look.close(anyway=True)
                watch._ran_out(error)
            raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "not enough memory" in text or "can't allocate memory" in text
    )
