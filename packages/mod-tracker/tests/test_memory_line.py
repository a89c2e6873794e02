"""Bytes alive over time, by the module that allocated them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mod_tracker.reports.charts import _colours
from mod_tracker.reports.charts._memory_line import AREAS, memory_line

STACKS = st.lists(st.integers(0, 4), max_size=3).map(
    lambda at: tuple(".".join(map(str, at[: end + 1])) for end in range(len(at)))
)


@st.composite
def _changes(draw):
    """What comes to be alive, and for most of it, when it goes."""
    sizes = draw(st.lists(st.tuples(STACKS, st.integers(1, 9)), min_size=1, max_size=30))
    changes = []
    for stack, size in sizes:
        begin = draw(st.integers(0, 10_000))
        changes.append((begin, stack, size))
        if draw(st.booleans()):
            changes.append((begin + draw(st.integers(0, 10_000)), stack, -size))
    return sorted(changes, key=lambda change: change[0])


@given(_changes(), st.integers(1, 50))
def test_areas_add_up_to_what_is_alive(changes, steps):
    """At every moment that is drawn, and the fullest moment is."""
    line = memory_line(changes, [(0, "forward"), (30_000, "outside")], steps=steps)
    assert len(line.moments) <= steps
    assert len(line.areas) <= AREAS
    alive, most = 0, 0
    possible = {}
    for at, _, size in changes:
        alive += size
        most = max(most, alive)
        possible.setdefault(at, set()).add(alive)
    sums = [sum(area.live[i] for area in line.areas) for i in range(len(line.moments))]
    assert all(found in possible[at] for at, found in zip(line.moments, sums, strict=True))
    assert line.peak == most == max(sums)
    assert all(area.peak >= max(area.live) >= 0 for area in line.areas)
    assert line.end == 30_000


def test_largest_module_is_divided_and_keeps_its_own():
    """One that holds little is one area, whatever is inside it."""
    changes = [(at, ("N", f"N.{at}"), 100) for at in range(AREAS - 2)]
    changes += [(20, ("M", "M.0"), 1), (21, ("M", "M.1"), 1), (22, ("N",), 5)]
    line = memory_line(changes, [(0, "forward")])
    names = [f"N.{at}" for at in range(AREAS - 2)]
    assert [area.name for area in line.areas] == [*names, "M", "N"]
    assert [area.peak for area in line.areas[-2:]] == [2, 5]


def test_smallest_of_too_many_modules_stay_with_the_one_around_them():
    """The largest have areas of their own, as many as there are colours for."""
    changes = [(at, ("N", f"N.{at}"), 100 + at) for at in range(AREAS + 3)]
    areas = {area.name: area.peak for area in memory_line(changes, [(0, "forward")]).areas}
    own = {f"N.{at}": 100 + at for at in range(4, AREAS + 3)}
    assert areas == {"N": 100 + 101 + 102 + 103, **own}
    assert len(areas) == AREAS


def test_blocks_of_a_model_with_a_head_are_told_apart():
    """As of a language model: a body of many parts, of which the blocks hold most."""
    body, changes = ("LM", "LM.model"), [(0, ("LM",), 1), (1, ("LM", "LM.head"), 9)]
    changes += [(at, (*body, f"LM.model.norm{at}"), 1) for at in range(2, 9)]
    changes += [(at, (*body, f"LM.model.layers.{at}"), 100) for at in range(10, 14)]
    names = [area.name for area in memory_line(changes, [(0, "forward")]).areas]
    assert {f"LM.model.layers.{at}" for at in range(10, 14)} < set(names)
    assert {"LM", "LM.head", "LM.model"} < set(names)


def test_phases_that_follow_alike_are_one():
    """From the start on, and an area of the outside has no name."""
    phases = [(100, "outside"), (150, "forward"), (160, "forward"), (200, "backward")]
    line = memory_line([(120, (), 4), (180, (), -4)], phases)
    assert line.phases == ((0, "outside"), (50, "forward"), (100, "backward"))
    assert (line.end, line.areas[0].name, line.areas[0].live) == (100, "", (4, 0))


def test_areas_have_a_colour_each():
    """Two areas of one colour could not be told apart."""
    assert len(set(_colours.AREAS)) == len(_colours.AREAS) == AREAS


def test_a_long_run_is_drawn_in_eight_hundred_moments():
    """The page stays small however long the run; where each has its own moment, all are drawn."""
    alternating = [(at, ("N",), 1 if at % 2 == 0 else -1) for at in range(8_000)]
    line = memory_line(alternating, [(0, "forward"), (7_999, "outside")])
    assert len(line.moments) == 800
    line = memory_line(alternating, [(0, "forward"), (8_007, "outside")])
    assert len(line.moments) == 728  # of eleven nanoseconds each
    whole = memory_line(alternating[:800], [(0, "forward"), (799, "outside")])
    assert len(whole.moments) == 800
