"""One report every n steps of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from .._errors import OptionError, check_callable, check_int
from ..reports._report import Report

_PASS = (
    "Pass profile_flops, profile_time, profile_memory or trace, or a function that calls one, such "
    "as functools.partial(profile_memory, model)."
)


class ReportSchedule:
    """Runs a report in one step of every n. Other steps run without hooks, modes or patches.

    Put `step()` around each step or, if that is not possible, call `begin_step()` and `end_step()`.
    For the trainers of transformers and Lightning use `transformers_callback` and
    `lightning_callback`.

    A step that raises has no report, and `step()` removes all hooks and modes. A step that
    `begin_step()` began and that never ended is abandoned by the next `begin_step()`, by `close()`,
    or at the end of a `with schedule:` block around the loop.

    Args:
        report: `profile_time`, for example, or a function without arguments that calls a report
            with options. It is called in each measured step.
        every_n_steps: measure the first of this many steps.
        on_report: called with the report and the step's number, after the step.
        skip_first: number of steps to skip before that, such as those that fill caches.

    Raises:
        OptionError: a number is not an int or is too small, or `on_report` is not callable. Also in
            the first measured step, if `report` does not return a report.

    Example:
        >>> import torch
        >>> from mod_tracker import profile_flops
        >>> model = torch.nn.Linear(4, 8)
        >>> def show(report, step):
        ...     print(step, report["Linear"].forward)
        >>> schedule = ReportSchedule(profile_flops, every_n_steps=2, on_report=show, skip_first=1)
        >>> for _ in range(4):
        ...     with schedule.step():
        ...         loss = model(torch.ones(1, 4)).sum()
        1 64
        3 64
    """

    def __init__(
        self,
        report: Callable[[], AbstractContextManager[Report[Any]]],
        *,
        every_n_steps: int,
        on_report: Callable[[Any, int], object],
        skip_first: int = 0,
    ) -> None:
        check_int("ReportSchedule", "every_n_steps", every_n_steps, 1)
        check_int("ReportSchedule", "skip_first", skip_first, 0)
        if not callable(report):
            raise OptionError(
                f"mod_tracker.ReportSchedule: report must be a function, called in each measured "
                f"step; got {type(report).__name__}. {_PASS}"
            )
        what = "a function of a report and its step"
        check_callable("ReportSchedule", "on_report", on_report, what)
        self._report, self._on_report = report, on_report
        self._every, self._skip = every_n_steps, skip_first
        self._told = 0
        self._open: AbstractContextManager[None] | None = None

    def step(self, number: int | None = None) -> AbstractContextManager[None]:
        """Return a context for the next step.

        Args:
            number: passed to `on_report`; by default the number of earlier steps. The schedule
                counts calls and ignores this number.
        """
        before = self._told
        self._told += 1
        if before < self._skip or (before - self._skip) % self._every:
            return nullcontext()
        return self._measured(before if number is None else number)

    def begin_step(self, number: int | None = None) -> None:
        """Begin a step; a step that has not ended is abandoned without a report."""
        self.close()
        self._open = self.step(number)
        self._open.__enter__()

    def end_step(self) -> None:
        """End the step; does nothing if none has begun."""
        try:
            if self._open is not None:
                self._open.__exit__(None, None, None)
        finally:
            self.close()

    def close(self) -> None:
        """Abandon a step that has not ended, without a report."""
        if self._open is not None:
            # Does nothing if the report has ended.
            self._open.__exit__(GeneratorExit, GeneratorExit(), None)
            self._open = None

    def __enter__(self) -> ReportSchedule:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _measured(self, number: int) -> Iterator[None]:
        context = self._report()
        if not isinstance(context, AbstractContextManager):
            raise _no_report(context)
        with context as report:
            if not isinstance(report, Report):
                raise _no_report(report)
            yield
        if report._ran:
            self._on_report(report, number)


def _no_report(value: object) -> OptionError:
    return OptionError(
        f"mod_tracker.ReportSchedule: report must make a Report; it made "
        f"{type(value).__name__}. {_PASS} Put watch_memory around the loop instead."
    )
