"""Amounts by module and phase: where one is, and what the sums over modules around it are."""

from __future__ import annotations

import pytest

from mod_tracker._record import Path
from mod_tracker.reports._phase_totals import PhaseTotals


def path_of(*names):
    """A path of its own through modules of these names."""
    path = Path(lambda: None)
    for name in names:
        path = Path(lambda: None, parent=path, name=name)
    return path


@pytest.fixture
def totals():
    """Some in a module, in the one around it, and outside, in several phases."""
    found = PhaseTotals()
    found.add(path_of("Net", "Net.0"), "forward", 1)
    found.add(path_of("Net", "Net.0"), "backward", 2)
    found.add(path_of("Net"), "recompute", 4)
    found.add(path_of(), "outside", 8)
    return found


def test_nothing_is_zero_outside_and_no_stack():
    """The outside has a row whatever was added."""
    found = PhaseTotals()
    assert found.by_module() == {"": {"forward": 0, "recompute": 0, "backward": 0}}
    assert (found.by_stack(), found.total) == ({}, 0)


def test_amounts_are_in_one_module_and_in_those_around_it(totals):
    """With the modules inside, and without them; a module without any has a row of zeros."""
    inside, own = totals.by_module(), totals.by_module(inside=False)
    assert inside["Net"] == {"forward": 1, "recompute": 4, "backward": 2}
    assert inside["Net.0"] == own["Net.0"] == {"forward": 1, "recompute": 0, "backward": 2}
    assert own["Net"] == {"forward": 0, "recompute": 4, "backward": 0}
    assert list(inside) == list(own) == ["", "Net", "Net.0"]


def test_amounts_of_modules_themselves_add_up_to_the_total(totals):
    """The outside among them."""
    own = totals.by_module(inside=False)
    assert sum(sum(phases.values()) for phases in own.values()) == totals.total == 15


def test_phase_that_is_none_of_the_three_counts_as_forward(totals):
    """By module; by stack it keeps its name."""
    assert totals.by_module()[""] == {"forward": 8, "recompute": 0, "backward": 0}
    assert totals.by_stack()[()] == {"outside": 8}


def test_forward_and_another_phase_outside_are_added():
    """Both are in the same column."""
    found = PhaseTotals()
    found.add_at((), "outside", 1)
    found.add_at((), "forward", 2)
    assert found.by_module()[""]["forward"] == 3


def test_module_that_is_around_itself_counts_once():
    """One that calls itself again has the amount of the inner call, and it is its own."""
    found = PhaseTotals()
    found.add(path_of("Net", "Net.0", "Net"), "forward", 5)
    assert found.by_module()["Net"]["forward"] == 5
    assert found.by_module(inside=False)["Net"]["forward"] == 5
    assert found.by_module(inside=False)["Net.0"]["forward"] == 0
    assert found.by_stack() == {("Net", "Net.0", "Net"): {"forward": 5}}


def test_paths_and_stacks_of_the_same_names_are_one_place():
    """Modules are told apart by name: one path may have died and another begun."""
    found = PhaseTotals()
    found.add(path_of("Net"), "forward", 1)
    found.add(path_of("Net"), "forward", 2)
    found.add_at(("Net",), "forward", 4)
    assert found.by_stack() == {("Net",): {"forward": 7}}
    assert found.by_module()["Net"]["forward"] == found.total == 7


def test_everything_of_another_is_added_and_that_one_stays(totals):
    """Paths, stacks, and the total that is kept on its own."""
    found, before = PhaseTotals(), totals.by_stack()
    found.add_at(("Net",), "recompute", 16)
    totals_of_stacks = PhaseTotals()
    totals_of_stacks.add_at(("Net",), "recompute", 32)
    for other in (totals, totals_of_stacks, PhaseTotals()):
        found.add_all(other)
    assert found.total == 15 + 16 + 32
    assert found.by_stack()["Net",] == {"recompute": 4 + 16 + 32}
    assert found.by_stack()["Net", "Net.0"] == {"forward": 1, "backward": 2}
    assert (totals.by_stack(), totals.total) == (before, 15)


def test_reading_changes_nothing(totals):
    """Sums made twice are the same, and what is returned may be changed."""
    totals.by_module()["Net"]["forward"] = 99
    totals.by_stack()["Net",]["forward"] = 99
    assert totals.by_module()["Net"]["forward"] == 1
    assert totals.by_stack()["Net",] == {"recompute": 4}
