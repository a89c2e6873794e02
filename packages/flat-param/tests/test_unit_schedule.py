"""What units ask of their schedule is in one protocol, which `Schedule` answers in full."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import flat_param
from flat_param.sharded._schedule import Schedule
from flat_param.sharded._unit_schedule import UnitSchedule

FOLDER = Path(flat_param.__file__).parent
METHODS = sorted(
    name
    for name, member in vars(UnitSchedule).items()
    if inspect.isfunction(member) and not name.startswith("_")
)
PROPERTIES = sorted(n for n, member in vars(UnitSchedule).items() if isinstance(member, property))
VALUES = sorted(UnitSchedule.__annotations__)


def test_protocol_has_members_of_each_kind() -> None:
    """Otherwise what follows would compare nothing."""
    assert {"enter", "leave", "settle"} <= set(METHODS)
    assert PROPERTIES == ["backward", "depth"]
    assert VALUES == ["lists", "log", "sync", "units"]


@pytest.mark.parametrize("name", METHODS)
def test_schedule_answers_with_the_same_arguments(name: str) -> None:
    """Of the same names, kinds and defaults: who reads the protocol can call the schedule."""

    def arguments(owner: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(getattr(owner, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in found]

    assert arguments(Schedule) == arguments(UnitSchedule)


def test_schedule_has_all_values_from_the_start() -> None:
    """Idle: nothing runs, nothing is listed, and the next backward sums."""
    schedule = Schedule()
    for name in (*VALUES, *PROPERTIES):
        assert hasattr(schedule, name), name
    assert schedule.units == []
    assert schedule.sync is True
    assert schedule.depth == 0
    assert schedule.backward is None


def _asked() -> set[str]:
    """Every name that is asked of something called `schedule`, but by the schedule itself."""
    names = set()
    for path in FOLDER.rglob("*.py"):
        if path.name == "_schedule.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                called = getattr(owner, "attr", None) or getattr(owner, "id", None)
                if called in ("schedule", "nested_schedule"):
                    names.add(node.attr)
    return names


def test_nobody_asks_for_more_than_the_protocol_says() -> None:
    """And nothing of it is without anybody who asks."""
    assert _asked() == {*METHODS, *PROPERTIES, *VALUES}
