"""Steps by the events of the Trainer of transformers."""

from __future__ import annotations

from torch import nn

from ._trainers import TrainerOfTransformers


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
