"""Steps by the events of Lightning's Trainer."""

from __future__ import annotations

from ._trainers import FLOPS_OF_A_BATCH, TrainerOfLightning


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
