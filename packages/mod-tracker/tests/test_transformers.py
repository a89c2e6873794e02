"""Steps by the events of the Trainer of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from mod_tracker import OptionError, ReportSchedule

from ._trainers import FACTORIES, FLOPS_OF_A_BATCH, TrainerCallback, TrainerOfTransformers


def test_step_that_is_given_up_has_no_report(callback, found, mlp):
    """The Trainer of transformers may stop after a batch of a step that has more."""
    original, made = nn.Module.__call__, callback("transformers")
    trainer = TrainerOfTransformers(mlp, [made])
    trainer.tell("on_step_begin")
    assert nn.Module.__call__ is not original
    trainer.tell("on_substep_end")
    trainer.tell("on_train_end")
    assert nn.Module.__call__ is original
    assert found == []


def tell(made, event, step=0):
    """Send an event as the Trainer does, with more by name than it has today."""
    state, control = SimpleNamespace(global_step=step), SimpleNamespace()
    return getattr(made, event)(None, state, control, model=None, processing_class=None)


def test_number_of_a_step_is_the_trainers(callback, found, mlp):
    """As of a run that goes on from a checkpoint."""
    made = callback("transformers")
    for step in (500, 501):
        tell(made, "on_step_begin", step)
        mlp(mlp.a.weight)
        tell(made, "on_step_end", step + 1)
    assert [number for number, _ in found] == [500, 501]


def test_events_of_batches_do_not_end_a_step(callback, found, mlp):
    """Nor do those of the optimizer, of evaluation and of saving."""
    made, original = callback("transformers"), nn.Module.__call__
    tell(made, "on_step_begin")
    mlp(mlp.a.weight)
    for event in ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_save"):
        tell(made, event)
        assert nn.Module.__call__ is not original
    tell(made, "on_step_end", 1)
    assert nn.Module.__call__ is original
    assert len(found) == 1


def test_evaluation_and_saving_are_in_no_step(callback, found, mlp):
    """What runs between two steps is not counted."""
    trainer = TrainerOfTransformers(mlp, [callback("transformers")], batches=2)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert found == [(0, FLOPS_OF_A_BATCH), (1, FLOPS_OF_A_BATCH)]


def test_step_that_ends_without_a_beginning_is_none(callback, found):
    """The end of a training that had no step as well."""
    made, original = callback("transformers"), nn.Module.__call__
    tell(made, "on_step_end")
    tell(made, "on_train_end")
    assert (found, nn.Module.__call__) == ([], original)


def test_step_that_begins_twice_is_measured_from_the_second_time(callback, found, mlp):
    """The first was given up without a word."""
    made, original = callback("transformers"), nn.Module.__call__
    tell(made, "on_step_begin", 3)
    mlp(mlp.a.weight)
    tell(made, "on_step_begin", 4)
    mlp.a(mlp.a.weight)
    tell(made, "on_step_end", 5)
    assert found == [(4, 2 * 4 * 4 * 4)]
    assert nn.Module.__call__ is original


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_train_end", "on_log"])
def test_events_give_the_trainer_nothing(event, callback):
    """What they gave would be its control."""
    made = callback("transformers")
    with made.schedule:
        assert tell(made, event) is None


def test_report_that_is_none_fails_in_the_first_step_and_leaves_nothing(mlp, stand_in_libraries):
    """The Trainer hears of it, and the class is as before."""
    original = nn.Module.__call__
    schedule = ReportSchedule(lambda: None, every_n_steps=1, on_report=print)
    trainer = TrainerOfTransformers(mlp, [FACTORIES["transformers"](schedule)])
    with pytest.raises(OptionError, match="must be a Report"):
        trainer.train()
    assert nn.Module.__call__ is original
    assert trainer.batches_begun == 0


def test_error_between_steps_leaves_nothing_open(callback, found, mlp):
    """Also without the schedule around the loop: a step that ended is over."""
    original, made = nn.Module.__call__, callback("transformers")
    tell(made, "on_step_begin")
    mlp(mlp.a.weight)
    tell(made, "on_step_end", 1)
    assert (len(found), nn.Module.__call__) == (1, original)


def test_callback_tells_of_its_events(callback):
    """Its help is that of its class, which is of ours and of the library's."""
    made = callback("transformers")
    assert "transformers.TrainerCallback" in type(made).__doc__
    assert type(made).__mro__.index(TrainerCallback) > 1
