"""A callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from ._callback import Callback, make
from ._schedule import ReportSchedule


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
