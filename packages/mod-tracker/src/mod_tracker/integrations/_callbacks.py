"""Callbacks for the Trainers of transformers and Lightning, each made when its library is there.

Note [Classes made late]
A trainer asks whether a callback is one of its own class, which cannot be a base of a class here
without a requirement. So the events are a class of ours, and the class that is handed out has
both as bases.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, ClassVar

from .._errors import MissingExtraError, OptionError
from ._schedule import ReportSchedule


class Callback:
    """Steps of a schedule.

    Attributes:
        function: name of the function that makes it.
        modules: where the library's class for callbacks may be; one is enough.
        base: the name of that class.
    """

    function: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    base: ClassVar[str]

    def __init__(self, schedule: ReportSchedule) -> None:
        super().__init__()
        self.schedule = schedule

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (type(self).__bases__[0], self.schedule)


def make(events: type[Callback], schedule: ReportSchedule) -> Any:
    """Return a callback that is of the library's class, too. See Note [Classes made late].

    Raises:
        OptionError: the argument is not a schedule.
        MissingExtraError: the library is not installed.
    """
    if not isinstance(schedule, ReportSchedule):
        raise OptionError(
            f"mod_tracker.{events.function}: a {type(schedule).__name__} is given, but it must be "
            "a ReportSchedule. Give ReportSchedule(profile_time, every_n_steps=100, on_report=...)."
        )
    kind = type(events.__name__, (events, _base(events)), {"__doc__": events.__doc__})
    return kind(schedule)


def _base(events: type[Callback]) -> type:
    # A module that is imported already comes first: it is the one whose trainer is used.
    for module in sorted(events.modules, key=lambda module: module not in sys.modules):
        try:
            return getattr(import_module(module), events.base)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise
            missing = error
    library = events.modules[0].partition(".")[0]
    raise MissingExtraError(
        f"mod_tracker.{events.function}: {library} is not installed, but its {events.base} is the "
        f"class of this callback. Install it: python -m pip install {library}."
    ) from missing


class TransformersCallback(Callback):
    """Steps by the events of `transformers.TrainerCallback`; see `transformers_callback`."""

    function = "transformers_callback"
    modules = ("transformers",)
    base = "TrainerCallback"

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin a step, before the first of its batches."""
        self.schedule.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End it, after the optimizer."""
        self.schedule.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave a step that was given up."""
        self.schedule.close()


def transformers_callback(schedule: ReportSchedule) -> Any:
    """Return a callback for `transformers.Trainer(callbacks=[...])` that runs a schedule.

    A step is the Trainer's: all batches of `gradient_accumulation_steps`, from the first's forward
    to the optimizer, without evaluation and saving. Its number is `state.global_step` where it
    begins.

    The Trainer has no event for a step that raises. `with schedule: trainer.train()` leaves
    nothing behind then; without it the report stays open until the next step begins.

    Raises:
        OptionError: the argument is not a schedule.
        MissingExtraError: transformers is not installed.
    """
    return make(TransformersCallback, schedule)


class LightningCallback(Callback):
    """Steps by the events of `lightning.pytorch.Callback`; see `lightning_callback`."""

    function = "lightning_callback"
    modules = ("lightning.pytorch", "pytorch_lightning")
    base = "Callback"

    def __init__(self, schedule: ReportSchedule) -> None:
        super().__init__(schedule)
        self._running: int | None = None

    def on_train_batch_start(self, trainer: Any, *others: Any) -> None:
        """Begin a step, unless this batch is of the one that runs."""
        if self._running is None:
            self._running = trainer.global_step
            self.schedule.begin_step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        """End it, if an optimizer has made its step."""
        if self._running is not None and trainer.global_step != self._running:
            self._running = None
            self.schedule.end_step()

    def _leave(self, *others: Any) -> None:
        self._running = None
        self.schedule.close()

    # What cuts a step off: validation between two of its batches, the end of an epoch, an error.
    on_train_start = on_validation_start = on_train_epoch_end = on_exception = _leave


def lightning_callback(schedule: ReportSchedule) -> Any:
    """Return a callback for `lightning.pytorch.Trainer(callbacks=[...])` that runs a schedule.

    A step ends with a step of an optimizer: it is all batches of `accumulate_grad_batches`, from
    the first's forward, with reading the others. Validation and saving come after it; a step that
    validation cuts in two has no report. Its number is `trainer.global_step` where it begins.
    An exception in a step, KeyboardInterrupt included, leaves nothing behind.

    Raises:
        OptionError: the argument is not a schedule.
        MissingExtraError: neither lightning nor pytorch_lightning is installed.
    """
    return make(LightningCallback, schedule)
