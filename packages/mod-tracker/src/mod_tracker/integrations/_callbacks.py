"""Callbacks that run a `ReportSchedule` in the Trainers of transformers and Lightning.

Each library is imported when its callback is made: a callback must be of the library's class.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from .._errors import MissingExtraError, OptionError
from ._schedule import ReportSchedule


def transformers_callback(schedule: ReportSchedule) -> Any:
    """Return a callback for `transformers.Trainer(callbacks=[...])` that runs a schedule.

    A step is the Trainer's: all batches of `gradient_accumulation_steps`, from the first forward to
    the optimizer step, without evaluation and saving. Its number is `state.global_step` at its
    beginning.

    The Trainer has no event for a step that raises: the report stays open until the next step
    begins. Use `with schedule: trainer.train()` to close it at once.

    Raises:
        OptionError: the argument is not a schedule.
        MissingExtraError: transformers is not installed.
    """
    _check("transformers_callback", schedule)
    base: Any = _class("transformers_callback", "TrainerCallback", "transformers")

    class TransformersCallback(base):
        """Begins and ends steps of a schedule by the events of `transformers.TrainerCallback`."""

        def __init__(self) -> None:
            super().__init__()
            self.schedule = schedule

        def __reduce__(self) -> tuple[Any, ...]:
            return transformers_callback, (schedule,)

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            schedule.begin_step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            schedule.end_step()

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            schedule.close()

    return TransformersCallback()


def lightning_callback(schedule: ReportSchedule) -> Any:
    """Return a callback for `lightning.pytorch.Trainer(callbacks=[...])` that runs a schedule.

    A step ends with an optimizer step. It is all batches of `accumulate_grad_batches`, from the
    first forward, including the time to load the later batches. Validation and saving come after
    it; a step that validation interrupts has no report. Its number is `trainer.global_step` at its
    beginning. A step that raises, also a KeyboardInterrupt, is abandoned and leaves no hooks or
    modes.

    Raises:
        OptionError: the argument is not a schedule.
        MissingExtraError: neither lightning nor pytorch_lightning is installed.
    """
    _check("lightning_callback", schedule)
    base: Any = _class("lightning_callback", "Callback", "lightning.pytorch", "pytorch_lightning")

    class LightningCallback(base):
        """Begins and ends steps of a schedule by the events of `lightning.pytorch.Callback`."""

        def __init__(self) -> None:
            super().__init__()
            self.schedule = schedule
            self._running: int | None = None

        def __reduce__(self) -> tuple[Any, ...]:
            return lightning_callback, (schedule,)

        def on_train_batch_start(self, trainer: Any, *others: Any) -> None:
            if self._running is None:
                self._running = trainer.global_step
                schedule.begin_step(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if self._running is not None and trainer.global_step != self._running:
                self._running = None
                schedule.end_step()

        def _leave(self, *others: Any) -> None:
            self._running = None
            schedule.close()

        # Events that end a step early: validation between its batches, the end of an epoch, an
        # error.
        on_train_start = on_validation_start = on_train_epoch_end = on_exception = _leave

    return LightningCallback()


def _check(function: str, schedule: object) -> None:
    if not isinstance(schedule, ReportSchedule):
        raise OptionError(
            f"mod_tracker.{function}: pass a ReportSchedule; got {type(schedule).__name__}. Make "
            "one by ReportSchedule(profile_time, every_n_steps=100, on_report=...)."
        )


def _class(function: str, name: str, *modules: str) -> Any:
    """Return a library's callback class, from the first of its modules that is installed."""
    # Prefer a module that is imported already: its trainer is the one in use.
    for module in sorted(modules, key=lambda module: module not in sys.modules):
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise
            missing = error
    library = modules[0].partition(".")[0]
    raise MissingExtraError(
        f"mod_tracker.{function}: {library} is not installed. Install it: python -m pip install "
        f"{library}."
    ) from missing
