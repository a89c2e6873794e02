"""Callbacks for transformers and Lightning, with the events in the order of their Trainers.

The Trainers themselves run in the repository's `tests/integration`.
"""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from mod_tracker import (
    OptionError,
    ReportSchedule,
    lightning_callback,
    profile_flops,
    transformers_callback,
)

FACTORIES = {"transformers": transformers_callback, "lightning": lightning_callback}


class TrainerCallback:
    """The callback base class of transformers."""

    def on_log(self, *args, **others):
        """Do nothing, like each event of the base class."""


class Callback:
    """The callback base class of Lightning."""

    def on_fit_start(self, *args):
        """Do nothing, like each event of the base class."""


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    """Fake modules with both base classes, so that the libraries need not be installed."""
    for name in ("transformers", "lightning", "lightning.pytorch"):
        module = ModuleType(name)
        module.TrainerCallback, module.Callback = TrainerCallback, Callback
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)


class Log(ReportSchedule):
    """A schedule that records its calls and measures nothing."""

    def __init__(self):
        super().__init__(lambda: None, every_n_steps=1, on_report=print)
        self.told = []

    def begin_step(self, number=None):
        """Record a beginning."""
        self.told.append(number)

    def end_step(self):
        """Record an end."""
        self.told.append("end")

    def close(self):
        """Record an abandoned step."""
        self.told.append("close")


@pytest.fixture
def log():
    """A schedule that records its calls."""
    return Log()


def at(step):
    """A trainer, or its state, after `step` steps."""
    return SimpleNamespace(global_step=step)


def tell(made, event, step=0):
    """Call an event as the Trainer of transformers does, with an extra keyword."""
    return getattr(made, event)(None, at(step), None, model=None, processing_class=None)


def test_step_of_transformers_is_the_trainers(log):
    made = transformers_callback(log)
    for event, step in (("on_step_begin", 5), ("on_log", 5), ("on_step_end", 6)):
        assert tell(made, event, step) is None  # a result would replace the control
    tell(made, "on_step_begin", 6)
    tell(made, "on_train_end", 6)
    assert log.told == [5, "end", 6, "close"]


def test_step_of_lightning_is_all_batches_of_one_optimizer_step(log):
    made = lightning_callback(log)
    for before, after in ((0, 0), (0, 0), (0, 1), (1, 3)):
        assert made.on_train_batch_start(at(before), None, None, 0) is None
        made.on_train_batch_end(at(after), None, None, None, 0)
    made.on_train_batch_end(at(4), None)
    assert log.told == [0, "end", 1, "end"]


@pytest.mark.parametrize(
    "event", ["on_train_start", "on_validation_start", "on_train_epoch_end", "on_exception"]
)
def test_lightning_step_ended_early_is_abandoned(event, log):
    """Nothing happens at the end of its last batch, and the next batch begins a new step."""
    made = lightning_callback(log)
    made.on_train_batch_start(at(2), None)
    getattr(made, event)(at(2), None, KeyboardInterrupt())
    made.on_train_batch_end(at(3), None)
    made.on_train_batch_start(at(3), None)
    assert log.told == [2, "close", 3]


def test_step_that_begins_twice_is_measured_from_the_second_time(mlp):
    found, original = [], nn.Module.__call__
    schedule = ReportSchedule(
        profile_flops, every_n_steps=1, on_report=lambda report, n: found.append((n, report.total))
    )
    made = transformers_callback(schedule)
    tell(made, "on_step_begin", 3)
    mlp(mlp.a.weight)
    tell(made, "on_step_begin", 4)
    mlp.a(mlp.a.weight)
    tell(made, "on_step_end", 5)
    assert found == [(4, 2 * 4 * 4 * 4)]
    assert nn.Module.__call__ is original


def test_report_that_is_none_fails_in_the_first_step():
    original = nn.Module.__call__
    schedule = ReportSchedule(lambda: None, every_n_steps=1, on_report=print)
    with pytest.raises(OptionError, match="must make a Report"):
        tell(transformers_callback(schedule), "on_step_begin")
    assert nn.Module.__call__ is original


@pytest.mark.parametrize(
    ("library", "base"), [("transformers", TrainerCallback), ("lightning", Callback)]
)
def test_callback_is_an_instance_of_the_librarys_class(library, base, log):
    """A trainer checks for its own class, and pickles the callback with its schedule."""
    schedule = ReportSchedule(profile_flops, every_n_steps=3, on_report=print)
    made = FACTORIES[library](schedule)
    for each in (made, pickle.loads(pickle.dumps(made))):
        assert isinstance(each, base)
        assert type(each).__name__ == f"{library.capitalize()}Callback"
        assert isinstance(each.schedule, ReportSchedule)


def test_imported_lightning_module_is_used(monkeypatch, log):
    older = ModuleType("pytorch_lightning")
    older.Callback = type("Callback", (), {})
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", older)
    assert isinstance(lightning_callback(log), older.Callback)


def test_broken_library_raises_its_own_error(monkeypatch, tmp_path, log):
    (tmp_path / "transformers.py").write_text("import no_such_module_of_its_own")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_its_own"):
        transformers_callback(log)
