"""Which places of a source are changed, and which lines a change is about."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
pytest.importorskip("coverage")
sys.path.insert(0, str(Path(__file__).parent))

from mutation_points import apply, is_in_function, points_of, sample, statement_lines
from test_mutate import SOURCE


def test_annotations_are_not_changed():
    """Nothing runs them; the same sign elsewhere is changed."""
    points = points_of("x.py", "def f(a: int | None) -> 'int': return a | 1\n")
    assert [p.start for p in points if "BitOr" in p.operator] == [(1, 40)]


def test_a_sample_is_the_same_for_a_seed_and_begins_like_a_smaller_one():
    """Another seed gives other mutants."""
    sources = {"toy.py": SOURCE}
    drawn = [list(sample(sources, 4, seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert list(sample(sources, 2, 0)) == drawn[0][:2]


def test_an_edit_redraws_only_the_lines_it_changes():
    """So what is known of the other lines stays known."""
    edited = SOURCE.replace('"""Two functions."""', '"""Two functions."""\n\nONE = 1')
    edited = edited.replace("    return a and b", "    if a:\n        return a and b")
    drawn = [
        [(m.before, m.after) for m in sample({"toy.py": source}, 50, 0)]
        for source in (SOURCE, edited)
    ]
    kept = [sides for sides in drawn[1] if sides in drawn[0]]
    assert len(kept) == len(drawn[0])
    first = len({point.start for point in points_of("toy.py", SOURCE)})
    assert [sides for sides in kept if sides in drawn[0][:first]][:first] == drawn[0][:first]


def test_the_same_line_twice_is_two_mutants():
    """What is known of one says nothing of the other."""
    source = "def f(a, b):\n    return a and b\n\ndef g(a, b):\n    return a and b\n"
    mutants = [m for m in sample({"toy.py": source}, 50, 0) if "And" in m.point.operator]
    assert sorted((m.nth, m.point.start[0]) for m in mutants) == [(0, 2), (1, 5)]


def test_every_place_is_drawn_before_one_is_drawn_again():
    """A place with many possible changes counts no more than one with one."""
    source = "x = 1 if a < b else 2\n"
    places = {point.start for point in points_of("toy.py", source)}
    drawn = sample({"toy.py": source}, len(places), 0)
    assert {mutant.point.start for mutant in drawn} == places


def test_each_point_is_another_program_and_differs_in_one_line():
    """Points and mutants are the same places, counted in the same order."""
    for point in points_of("toy.py", SOURCE):
        mutant = apply(point, SOURCE)
        differ = [
            number
            for number, pair in enumerate(
                zip(SOURCE.split("\n"), mutant.source.split("\n"), strict=True), 1
            )
            if pair[0] != pair[1]
        ]
        assert differ == [point.start[0]]


def test_the_lines_of_a_statement_end_where_its_body_begins():
    """A change of the head of a block is asked about where the head runs."""
    source = "if (\n    a\n    and b\n):\n    c = [\n        1,\n    ]\n"
    assert [list(statement_lines(source, line)) for line in (3, 6)] == [[1, 2, 3, 4], [5, 6, 7]]


def test_a_line_runs_with_a_function_only_in_its_body():
    """Defaults and class bodies run while the module is imported."""
    source = "X = 1\nclass A:\n    y = 2\n    def f(self, a=3):\n        return a\n"
    assert [line for line in range(1, 6) if is_in_function(source, line)] == [5]
