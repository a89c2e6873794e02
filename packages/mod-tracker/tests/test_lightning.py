"""Steps by the events of Lightning's Trainer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from mod_tracker import OptionError, ReportSchedule

from ._trainers import FACTORIES, FLOPS_OF_A_BATCH, TrainerOfLightning


def test_step_that_validation_cuts_in_two_has_no_report(callback, found, mlp):
    """Lightning may validate between two batches of a step: their sum would be another's."""
    made = callback("lightning")
    TrainerOfLightning(mlp, [made], accumulate=2, batches=6, validate_after=2).train()
    assert (0, 2 * FLOPS_OF_A_BATCH) in found
    assert (2, 2 * FLOPS_OF_A_BATCH) in found
    assert max(flops for _, flops in found) == 2 * FLOPS_OF_A_BATCH


def test_step_that_the_end_of_an_epoch_cuts_off_has_no_report(callback, found, mlp):
    """Where a strategy of Lightning accumulates itself, the last batch may be without a step."""
    made, whole = callback("lightning"), 3 * FLOPS_OF_A_BATCH
    TrainerOfLightning(mlp, [made], accumulate=3, batches=4, epochs=2, last_steps=False).train()
    assert found == [(0, whole), (1, whole)]


def test_several_optimizers_step_in_a_batch(callback, found, mlp):
    """Under manual optimization Lightning counts each of them; the schedule counts batches."""
    TrainerOfLightning(mlp, [callback("lightning", 3)], optimizers=2, batches=4).train()
    assert found == [(0, FLOPS_OF_A_BATCH), (6, FLOPS_OF_A_BATCH)]


class Log(ReportSchedule):
    """A schedule that writes down what it is told, and measures nothing."""

    def __init__(self):
        super().__init__(lambda: None, every_n_steps=1, on_report=print)
        self.told = []

    def begin_step(self, number=None):
        """Note a beginning."""
        self.told.append(number)

    def end_step(self):
        """Note an end."""
        self.told.append("end")

    def close(self):
        """Note that a step was left."""
        self.told.append("close")


@pytest.fixture
def log():
    """What a schedule was told."""
    return Log()


@pytest.fixture
def made(log, stand_in_libraries):
    """A callback that tells the log."""
    return FACTORIES["lightning"](log)


def at(step):
    """A trainer that has made so many steps."""
    return SimpleNamespace(global_step=step)


def test_step_begins_with_its_first_batch_alone(log, made):
    """It has the number of steps before it, and ends with the batch that an optimizer ended."""
    for before, after in ((5, 5), (5, 5), (5, 6), (6, 7)):
        made.on_train_batch_start(at(before), None, None, 0)
        made.on_train_batch_end(at(after), None, None, None, 0)
    assert log.told == [5, "end", 6, "end"]


def test_first_step_of_all_is_a_step(log, made):
    """Its number is 0, which is not no number."""
    made.on_train_batch_start(at(0), None)
    made.on_train_batch_start(at(0), None)
    made.on_train_batch_end(at(0), None)
    made.on_train_batch_end(at(1), None)
    assert log.told == [0, "end"]


def test_batch_that_ends_without_a_beginning_ends_nothing(log, made):
    """As of a run that began in the middle."""
    made.on_train_batch_end(at(3), None)
    assert log.told == []


@pytest.mark.parametrize(
    "event", ["on_train_start", "on_validation_start", "on_train_epoch_end", "on_exception"]
)
def test_what_cuts_a_step_off_leaves_it(event, log, made):
    """The end of its last batch is none then, and the next batch begins another."""
    made.on_train_batch_start(at(2), None)
    getattr(made, event)(at(2), None, KeyboardInterrupt())
    made.on_train_batch_end(at(3), None)
    made.on_train_batch_start(at(3), None)
    assert log.told == [2, "close", 3]


def test_step_may_end_with_a_smaller_number(log, made):
    """A trainer that was set back to a checkpoint counts from there."""
    made.on_train_batch_start(at(9), None)
    made.on_train_batch_end(at(4), None)
    assert log.told == [9, "end"]


@pytest.mark.parametrize(
    "event",
    ["on_train_batch_start", "on_train_batch_end", "on_train_start", "on_exception"],
)
def test_events_give_the_trainer_nothing(event, made):
    """A result of -1 would end its epoch."""
    assert getattr(made, event)(at(0), None, None, 0) is None


def test_report_that_is_none_fails_in_the_first_step_and_leaves_nothing(mlp, stand_in_libraries):
    """The trainer hears of it, and the class is as before."""
    original = nn.Module.__call__
    schedule = ReportSchedule(lambda: None, every_n_steps=1, on_report=print)
    trainer = TrainerOfLightning(mlp, [FACTORIES["lightning"](schedule)])
    with pytest.raises(OptionError, match="must be a Report"):
        trainer.train()
    assert nn.Module.__call__ is original
    assert trainer.batches_begun == 0


def test_next_fit_begins_anew(callback, found, mlp):
    """One that was killed in a step without a word has left it open."""
    made = callback("lightning")
    TrainerOfLightning(mlp, [made]).tell("on_train_batch_start", None, 0)
    TrainerOfLightning(mlp, [made], checks=False, batches=2).train()
    assert found == [(0, FLOPS_OF_A_BATCH), (1, FLOPS_OF_A_BATCH)]


def test_callback_tells_of_its_events(made):
    """Its help is that of its class, and it has the library's other events."""
    assert "lightning.pytorch.Callback" in type(made).__doc__
    assert made.on_fit_start(None, None) is None
