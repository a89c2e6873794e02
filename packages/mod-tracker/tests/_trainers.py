"""Loops that send the events of transformers and of Lightning, in their order.

The trainers here are stand-ins: the real ones are in the repository's `tests/integration`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mod_tracker import lightning_callback, transformers_callback

FACTORIES = {"transformers": transformers_callback, "lightning": lightning_callback}
# Forward of 2 layers of 4 by 4 with 2 rows, and backward: of the input's gradient there is none.
FLOPS_OF_A_BATCH = 2 * (2 * 2 * 16) + 3 * (2 * 2 * 16)


class TrainerCallback:
    """The base class of transformers: every event there is does nothing."""


class Callback:
    """The base class of Lightning."""


def _ignore(self, *args, **others):
    return None


for _name in (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"),
    *("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_step_end", "on_evaluate", "on_save", "on_log"),
):
    setattr(TrainerCallback, _name, _ignore)
for _name in (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_start", "on_validation_end", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_exception", "on_sanity_check_start"),
):
    setattr(Callback, _name, _ignore)


class Loop:
    """What both trainers do: batches, an optimizer, and callbacks that hear of it."""

    def __init__(
        self,
        model,
        callbacks,
        *,
        accumulate=1,
        batches=4,
        epochs=1,
        fails_at=None,
        last_steps=True,
    ):
        self.model, self.callbacks, self.accumulate = model, callbacks, accumulate
        self.batches, self.epochs, self.fails_at = batches, epochs, fails_at
        self.last_steps = last_steps
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.global_step = self.batches_begun = 0

    def batch(self):
        """Forward and backward."""
        self.batches_begun += 1
        self.model(torch.ones(2, 4)).sum().backward()
        if self.batches_begun == self.fails_at:
            raise KeyboardInterrupt

    def evaluate(self):
        """Products that are of no step."""
        with torch.no_grad():
            self.model(torch.ones(64, 4))

    def steps_now(self, batch):
        """Whether the optimizer steps after a batch: after n of them, and after the last."""
        return (batch + 1) % self.accumulate == 0 or (self.last_steps and batch + 1 == self.batches)


class TrainerOfTransformers(Loop):
    """Events with args, state and control, and the rest by name."""

    def tell(self, event, **others):
        """Call an event of every callback."""
        state, control = SimpleNamespace(global_step=self.global_step), SimpleNamespace()
        for callback in self.callbacks:
            told = {"model": self.model, "optimizer": self.optimizer, **others}
            assert getattr(callback, event)(None, state, control, **told) is None

    def train(self):
        """Train, with an evaluation after each step."""
        self.tell("on_init_end")
        self.tell("on_train_begin")
        for _ in range(self.epochs):
            self.tell("on_epoch_begin")
            for batch in range(self.batches):
                if batch % self.accumulate == 0:
                    self.tell("on_step_begin")
                self.batch()
                if not self.steps_now(batch):
                    self.tell("on_substep_end")
                    continue
                self.tell("on_pre_optimizer_step")
                self.optimizer.step()
                self.tell("on_optimizer_step")
                self.model.zero_grad()
                self.global_step += 1
                self.tell("on_step_end")
                self.evaluate()
                self.tell("on_evaluate", metrics={})
            self.tell("on_epoch_end")
        self.tell("on_train_end")


class TrainerOfLightning(Loop):
    """Events with the trainer and the module; an error is one of them."""

    def __init__(self, *args, checks=True, validate_after=None, optimizers=1, **options):
        super().__init__(*args, **options)
        self.checks, self.validate_after, self.optimizers = checks, validate_after, optimizers

    def tell(self, event, *others):
        """Call an event of every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(self, self.model, *others)

    def train(self):
        """`fit`, with validation where it is asked for."""
        try:
            self.fit()
        except BaseException as error:
            self.tell("on_exception", error)
            raise

    def fit(self):
        """Train, after a check that validation runs."""
        self.tell("setup", "fit")
        self.tell("on_fit_start")
        if self.checks:
            self.validate()
        self.tell("on_train_start")
        for _ in range(self.epochs):
            self.tell("on_train_epoch_start")
            for batch in range(self.batches):
                self.tell("on_train_batch_start", None, batch)
                self.batch()
                self.tell("on_after_backward")
                if self.steps_now(batch):
                    self.tell("on_before_optimizer_step", self.optimizer)
                    self.optimizer.step()
                    self.global_step += self.optimizers
                self.tell("on_train_batch_end", None, None, batch)
                if batch == self.validate_after:
                    self.validate()
            self.tell("on_train_epoch_end")
        self.tell("on_train_end")
        self.tell("teardown", "fit")

    def validate(self):
        """Run the validation."""
        self.tell("on_validation_start")
        self.evaluate()
        self.tell("on_validation_end")


TRAINERS = {"transformers": TrainerOfTransformers, "lightning": TrainerOfLightning}
BOTH = pytest.mark.parametrize("library", list(TRAINERS))
