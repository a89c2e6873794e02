"""A scene that an interrupt breaks fails, and a safe one passes."""

from __future__ import annotations

import importlib
import math
import sys

import pytest
from stress.interrupts import Scene, scenario
from stress.trials import Asked, run_scenario
from torch import nn

PART = """
held = []

def careless(then):
    held.append(1)
    then()
    held.pop()

def careful(then):
    try:
        held.append(1)
        then()
    finally:
        held.clear()
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A package with one function that leaves state behind and one that does not."""
    folder = tmp_path / "made_up_part"
    folder.mkdir()
    (folder / "__init__.py").write_text(PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "made_up_part"
    sys.modules.pop("made_up_part", None)


def result_of(part, name, then=lambda: None, wrong=None):
    """Return the result of interrupting a function of the part at every place."""

    def make(folder):
        module = importlib.import_module(part)
        act = getattr(module, name)
        return Scene(lambda: act(then), wrong or (lambda: "held" if module.held else ""))

    return run_scenario(scenario("made-up", part, make), Asked(), math.inf)


def test_careless_part_fails_and_careful_one_passes(part):
    """Two places of the careless function leave state behind."""
    careless, careful = result_of(part, "careless"), result_of(part, "careful")
    assert careless.tried > 2
    assert {"held" in each.why for each in careless.failures} == {True}
    assert len(careless.failures) >= 1
    assert "__init__.py" in careless.failures[0].why
    assert careful.tried > 2
    assert careful.failures == []


def test_hook_left_behind_is_a_failure(part):
    """The process is checked, whatever the scene returns."""
    then = lambda: nn.modules.module.register_module_forward_hook(lambda *_: None)  # noqa: E731
    found = result_of(part, "careful", then, lambda: "")
    assert "hooks in _global_forward_hooks" in found.failures[0].why


def test_interrupt_turned_into_another_error_is_a_failure(part):
    """A user who presses Ctrl-C expects a KeyboardInterrupt."""

    def make(folder):
        module = importlib.import_module(part)

        def act():
            try:
                module.careful(lambda: None)
            except KeyboardInterrupt:
                raise ValueError("damaged") from None

        return Scene(act, lambda: "")

    found = run_scenario(scenario("made-up", part, make), Asked(), math.inf)
    assert "became ValueError: damaged" in found.failures[0].why
