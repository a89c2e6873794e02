"""The tool itself, on a package of two functions, one of which has no test."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
pytest.importorskip("coverage")
sys.path.insert(0, str(Path(__file__).parent))

import mutate
from mutation_equivalent import Known, load
from mutation_points import apply, is_in_function, points_of, sample, statement_lines

SOURCE = '''"""Two functions."""

def larger(a: int, b: int | None) -> int:
    return a if b is None or a > b else b

def untested(a, b):
    return a and b
'''

TESTS = """
import pytest
import toy

@pytest.mark.parametrize("pair", [(1, 2), (2, 1)])
def test_larger(pair):
    assert toy.larger(*pair) == 2

def test_larger_of_one():
    assert toy.larger(1, None) == 1

def test_that_fails_anyway():
    raise AssertionError

def test_untested_is_run():
    toy.untested(1, 2)
"""

EQUIVALENT = """
[[mutant]]
package = "toy"
file = "toy/__init__.py"
line = "return a if b is None or a > b else b"
operator = "ReplaceComparisonOperator_Gt_GtE"
why = "of two equal numbers either is the larger"

[[mutant]]
package = "toy"
file = "toy/__init__.py"
line = "return a if a > b else b"
operator = "ReplaceComparisonOperator_Gt_GtE"
why = "the line is not there any more"
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What one run on the toy package prints, its exit code, and its folder."""
    root = tmp_path_factory.mktemp("toy")
    home = root / "packages/toy"
    for path, text in (
        (home / "src/toy/__init__.py", SOURCE),
        (home / "tests/test_toy.py", TESTS),
        (root / "storm/equivalent.toml", EQUIVALENT),
        (root / "pytest.ini", "[pytest]\nmarkers =\n  slow: x\n  cuda: x\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    patch = pytest.MonkeyPatch()
    with patch.context() as change:
        change.setattr(mutate, "ROOT", root)
        change.setitem(mutate.PACKAGES, "toy", Path("packages/toy"))
        written, change_out = [], change.setattr
        change_out("builtins.print", lambda *args, **_: written.append(" ".join(map(str, args))))
        args = argparse.Namespace(
            package="toy", count=50, seed=0, timeout=60.0, only=None, again=False
        )
        code = mutate.mutate(root, args)
    return "\n".join(written), code, root


def test_a_change_that_a_test_notices_is_caught(told):
    """The comparison turned is caught, by the test of the function."""
    text, _, _ = told
    place = text.index("caught     toy/__init__.py:4 ReplaceComparisonOperator_Gt_LtE")
    assert "test_larger[pair" in text[place:].split("\n")[3]


def test_a_change_that_no_test_notices_survives(told):
    """It is printed with its place and both lines, and the exit code is 1."""
    text, code, _ = told
    survivor = (
        "survived   toy/__init__.py:7 ReplaceAndWithOr\n    - return a and b\n    + return a or b"
    )
    assert survivor in text
    assert code == 1


def test_a_change_known_to_change_nothing_is_not_tried(told):
    """It is counted apart, and not among those that matter."""
    text, _, _ = told
    assert "toy/__init__.py:4 ReplaceComparisonOperator_Gt_GtE" not in text
    assert "1 survived, 1 equivalent; " in text


def test_an_entry_whose_line_is_gone_is_reported(told):
    """So the list of what changes nothing does not outlive the code."""
    text, _, _ = told
    assert (
        "stale in equivalent.toml, as no such change can be made: toy/__init__.py: "
        "ReplaceComparisonOperator_Gt_GtE of 'return a if a > b else b'"
    ) in text


def test_a_test_that_fails_without_a_change_is_left_out(told):
    """Or every change would seem caught."""
    text, _, _ = told
    assert "left out, as it fails without a change: packages/toy/tests/test_toy.py" in text


def test_the_source_is_only_read(told):
    """The changes are made in a copy, which is gone afterwards."""
    _, _, root = told
    assert (root / "packages/toy/src/toy/__init__.py").read_text(encoding="utf-8") == SOURCE


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


def test_an_entry_without_a_reason_is_refused(tmp_path):
    """The list says why, each time."""
    path = tmp_path / "equivalent.toml"
    path.write_text('[[mutant]]\npackage = "toy"\nfile = "f"\nline = "x"\noperator = "AddNot"\n')
    with pytest.raises(ValueError, match="entry for 'x' has no reason, but each needs one"):
        load(path, "toy")


def test_a_package_without_entries_has_none(tmp_path):
    """Nor is the list needed."""
    assert load(tmp_path / "equivalent.toml", "toy") == Known([])


def test_a_share_below_the_wanted_one_is_a_failure(capsys):
    """94 of 100 is too few, 95 is enough, and equivalent ones count for neither."""
    trials = {
        end: mutate.Trial(end, "", "f.py", 1, "AddNot", "a", "b")
        for end in ("caught", "survived", "equivalent", "timed out")
    }
    few = [trials["caught"]] * 94 + [trials["survived"]] * 6 + [trials["equivalent"]] * 100
    enough = [trials["caught"]] * 94 + [trials["timed out"]] + [trials["survived"]] * 5
    assert [mutate.report(few, []), mutate.report(enough, [])] == [1, 0]
    assert "94.0 % of 100 noticed" in capsys.readouterr().out
