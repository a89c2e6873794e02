"""Callbacks of either library: the class that is made late, and the steps of a trainer's loop."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mod_tracker import ReportSchedule, profile_flops

from ._trainers import (
    BOTH,
    FACTORIES,
    FLOPS_OF_A_BATCH,
    TRAINERS,
    Callback,
    TrainerCallback,
    TrainerOfLightning,
    TrainerOfTransformers,
)

pytestmark = pytest.mark.usefixtures("stand_in_libraries")


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
