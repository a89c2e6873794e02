"""Callbacks in loops that send the events of transformers and of Lightning, in their order.

The trainers here are stand-ins: the real ones are in the repository's `downstream` folder.
"""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mod_tracker import (
    ReportSchedule,
    lightning_callback,
    profile_flops,
    transformers_callback,
)

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


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    names = ("transformers", "lightning", "lightning.pytorch")
    modules = {name: ModuleType(name) for name in names}
    modules["transformers"].TrainerCallback = TrainerCallback
    modules["lightning.pytorch"].Callback = Callback
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)


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


@pytest.fixture
def found():
    """(step, FLOPs) of each report."""
    return []


@pytest.fixture
def callback(found):
    """`callback(library, n)` makes a callback that adds to `found`."""

    def make(library, every=1, **options):
        note = lambda report, number: found.append((number, report.total))  # noqa: E731
        schedule = ReportSchedule(profile_flops, every_n_steps=every, on_report=note, **options)
        return FACTORIES[library](schedule)

    return make


@BOTH
def test_steps_of_a_trainer_are_measured_without_evaluation(library, callback, found, mlp):
    """One of every two; its number is how many the trainer had done before."""
    TRAINERS[library](mlp, [callback(library, 2)], epochs=2, batches=3).train()
    assert found == [(number, FLOPS_OF_A_BATCH) for number in (0, 2, 4)]


@BOTH
def test_batches_that_are_accumulated_are_one_step(library, callback, found, mlp):
    """From the first batch to the optimizer; the last of an epoch may have fewer."""
    TRAINERS[library](mlp, [callback(library)], accumulate=3, batches=5, epochs=2).train()
    assert found == [(step, (3, 2, 3, 2)[step] * FLOPS_OF_A_BATCH) for step in range(4)]


@BOTH
def test_weights_are_those_of_a_run_without_callback(library, callback, mlp):
    """To the last bit."""
    plain = type(mlp)()
    plain.load_state_dict(mlp.state_dict())
    TRAINERS[library](mlp, [callback(library, 2)]).train()
    TRAINERS[library](plain, []).train()
    for mine, other in zip(mlp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


@BOTH
def test_several_callbacks_are_told_in_one_order(library, callback, found, mlp):
    """The trainer ends first what it began first: each measures its own steps, all of them."""
    both = [callback(library, 1), callback(library, 2)]
    TRAINERS[library](mlp, both, batches=3).train()
    assert not is_in_torch_dispatch_mode()
    assert sorted(found) == [(step, FLOPS_OF_A_BATCH) for step in (0, 0, 1, 2, 2)]


@BOTH
def test_interrupted_run_leaves_nothing_behind(library, callback, found, mlp):
    """Lightning tells of it; for transformers the schedule goes around `train()`."""
    original, made = nn.Module.__call__, callback(library)
    trainer = TRAINERS[library](mlp, [made], accumulate=2, fails_at=3)
    if library == "transformers":
        with pytest.raises(KeyboardInterrupt), made.schedule:
            trainer.train()
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert nn.Module.__call__ is original
    assert found == [(0, 2 * FLOPS_OF_A_BATCH)]


@BOTH
def test_next_run_leaves_what_one_has_left_open(library, callback, found, mlp):
    """Also where nobody told of the error; then it measures as ever."""
    original, made = nn.Module.__call__, callback(library, 2)
    if library == "transformers":
        trainer = TrainerOfTransformers(mlp, [made])
        trainer.tell("on_step_begin")
    else:
        trainer = TrainerOfLightning(mlp, [made], checks=False)
        trainer.tell("on_train_batch_start", None, 0)
    assert nn.Module.__call__ is not original
    trainer.train()
    assert nn.Module.__call__ is original
    assert found == [(1, FLOPS_OF_A_BATCH), (3, FLOPS_OF_A_BATCH)]


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


def test_several_optimizers_step_in_a_batch(callback, found, mlp):
    """Under manual optimization Lightning counts each of them; the schedule counts batches."""
    TrainerOfLightning(mlp, [callback("lightning", 3)], optimizers=2, batches=4).train()
    assert found == [(0, FLOPS_OF_A_BATCH), (6, FLOPS_OF_A_BATCH)]


@pytest.mark.parametrize(
    ("library", "base"), [("transformers", TrainerCallback), ("lightning", Callback)]
)
def test_callback_is_one_of_the_library(library, base, callback):
    """A trainer asks for its own class, and the callback is named for what it is."""
    made = callback(library)
    assert isinstance(made, base)
    assert type(made).__name__ == f"{library.capitalize()}Callback"


@BOTH
def test_callback_is_pickled_with_its_schedule(library):
    """A launcher of processes sends its callbacks to them."""
    schedule = ReportSchedule(profile_flops, every_n_steps=3, on_report=print)
    copied = pickle.loads(pickle.dumps(FACTORIES[library](schedule)))
    assert type(copied).__name__ == f"{library.capitalize()}Callback"
    assert isinstance(copied.schedule, ReportSchedule)


def test_name_of_lightning_that_is_imported_is_used(monkeypatch, tmp_path, callback):
    """`pytorch_lightning` has classes of its own, and its trainer takes no others."""
    older = ModuleType("pytorch_lightning")
    older.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "pytorch_lightning", older)
    assert isinstance(callback("lightning"), Callback)
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning/pytorch.py").write_text("class Callback: pass")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.delitem(sys.modules, name)
    assert isinstance(callback("lightning"), older.Callback)


def test_library_that_lacks_something_itself(monkeypatch, tmp_path, callback):
    """Its own error is shown: installing it again would not help."""
    (tmp_path / "transformers.py").write_text("import no_such_module_of_its_own")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_its_own"):
        callback("transformers")
