"""A scene that an interrupt can spoil is reported, and one that it cannot is not."""

from __future__ import annotations

import importlib
import math
import sys

import pytest
from torch import nn

from storm.interrupts import Scene, scenario
from storm.trials import Asked, storm

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
    """A package with one function that loses and one that does not."""
    folder = tmp_path / "made_up_part"
    folder.mkdir()
    (folder / "__init__.py").write_text(PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "made_up_part"
    sys.modules.pop("made_up_part", None)


def lost(part, name, then=lambda: None, wrong=None):
    """What a scan of a function of the part loses."""

    def make(folder):
        module = importlib.import_module(part)
        act = getattr(module, name)
        return Scene(lambda: act(then), wrong or (lambda: "held" if module.held else ""))

    return storm(scenario("made-up", part, make), Asked(), math.inf)


def test_a_careless_part_is_lost_and_a_careful_one_is_not(part):
    """Two places of the careless one leave something behind."""
    careless, careful = lost(part, "careless"), lost(part, "careful")
    assert careless.tried > 2
    assert {"held" in each.why for each in careless.lost} == {True}
    assert len(careless.lost) >= 1
    assert "__init__.py" in careless.lost[0].why
    assert careful.tried > 2
    assert careful.lost == []


def test_a_hook_that_is_left_is_a_loss(part):
    """The process is looked at, whatever the scene says."""
    then = lambda: nn.modules.module.register_module_forward_hook(lambda *_: None)  # noqa: E731
    found = lost(part, "careful", then, lambda: "")
    assert "hooks in _global_forward_hooks" in found.lost[0].why


def test_an_interrupt_that_becomes_another_error_is_a_loss(part):
    """Whoever presses Ctrl-C waits for a KeyboardInterrupt."""

    def make(folder):
        module = importlib.import_module(part)

        def act():
            try:
                module.careful(lambda: None)
            except KeyboardInterrupt:
                raise ValueError("damaged") from None

        return Scene(act, lambda: "")

    found = storm(scenario("made-up", part, make), Asked(), math.inf)
    assert "became ValueError: damaged" in found.lost[0].why
