"""A callback for the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

from ._callback import Callback, make
from ._schedule import ReportSchedule


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
