"""The tool itself, on a package of two functions, one of which has no test."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
pytest.importorskip("coverage")
sys.path.insert(0, str(Path(__file__).parent))

import mutate
import mutation_page
import mutation_tests
from mutation_equivalent import Known, load
from mutation_points import apply, is_in_function, points_of, sample, statement_lines
from mutation_trials import Run

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
    return *mutate_toy(root), root


def mutate_toy(root, *, seconds=60.0, again=False, slow=False):
    """Run the tool on the toy package; return what it prints, and its exit code."""
    with pytest.MonkeyPatch.context() as change:
        change.setattr(mutate, "ROOT", root)
        change.setitem(mutate.PACKAGES, "toy", Path("packages/toy"))
        written = []
        change.setattr(
            "builtins.print", lambda *args, **_: written.append(" ".join(map(str, args)))
        )
        args = argparse.Namespace(
            package="toy",
            count=50,
            seed=0,
            timeout=60.0,
            seconds=seconds,
            only=None,
            again=again,
            slow=slow,
        )
        code = mutate.mutate(root, args)
    return "\n".join(written), code


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


def test_again_tries_what_survived_and_counts_everything(told, tmp_path):
    """After a test was added, its change is the only one tried, and the counts have them all."""
    text, _, root = told
    shutil.copytree(root, tmp_path / "toy")
    root, added = tmp_path / "toy", "\ndef test_untested():\n    assert toy.untested(1, 0) == 0\n"
    with (root / "packages/toy/tests/test_toy.py").open("a", encoding="utf-8") as tests:
        tests.write(added)
    again, code = mutate_toy(root, again=True)
    told_of = [line for line in again.split("\n") if line.startswith("[")]
    assert ["caught     toy/__init__.py:7 ReplaceAndWithOr" in line for line in told_of] == [True]
    count = text.split("\n")[-1].partition(" tried")[0]
    assert again.split("\n")[-1] == f"{count} tried: {int(count) - 1} caught, 0 timed out, " + (
        f"0 survived, 1 equivalent; 100.0 % of {int(count) - 1} noticed"
    )
    assert code == 0


def test_slow_tests_are_run_if_asked_for(told, tmp_path):
    """They may be the only ones that notice."""
    _, _, root = told
    shutil.copytree(root, tmp_path / "toy")
    root, added = tmp_path / "toy", "\n@pytest.mark.slow\ndef test_untested():\n"
    with (root / "packages/toy/tests/test_toy.py").open("a", encoding="utf-8") as tests:
        tests.write(added + "    assert toy.untested(1, 0) == 0\n")
    codes = [mutate_toy(root, again=True, slow=slow)[1] for slow in (False, True)]
    assert codes == [1, 0]


def test_distributed_tests_are_asked_about_the_whole_of_a_folder_that_is_distributed():
    """A file of it may only be run by them, and say nothing of it."""
    tests = with_times(dict.fromkeys(ORDERED, 0.1))
    tests.known["test_other.py"].tests["test_other.py::a"]["dist"] = True
    mutant = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 3)
    assert [len(names) for names in tests.rounds(mutant)] == [2, 0]
    tests.source["toy/_ranks.py"] = "import torch.distributed\n"
    assert [len(names) for names in tests.rounds(mutant)] == [1, 2]


def test_without_time_every_change_survives_and_the_share_is_a_lower_bound(told, tmp_path):
    """What no test was run for is not caught, and the last line says so."""
    _, _, root = told
    shutil.copytree(root, tmp_path / "toy")
    text, code = mutate_toy(tmp_path / "toy", seconds=0.0)
    last = "survived the tests they were given time for, and not all"
    assert text.split("\n")[-1].startswith("a lower bound: ")
    assert text.split("\n")[-1].endswith(last)
    assert " 0 caught, 0 timed out, " in text
    assert code == 1


def with_times(seconds):
    """Tests of a module `toy/part.py`, whose third line is in a function, by name and time."""
    known, texts = {}, {}
    for name, usual_s in seconds.items():
        file = name.partition("::")[0]
        run = known.setdefault(file, Run("", "", 0.0, {}, {"toy/part.py": {"1": [-1], "3": []}}))
        if file == "test_other.py":
            run.lines["toy/part.py"]["3"].append(len(run.tests))
        run.tests[name] = {"outcome": "passed", "dist": False, "seconds": usual_s}
        texts[file] = "from toy.part import f" if file == "test_user.py" else ""
    return mutation_tests.Tests(
        {"toy/part.py": "x = 1 + 2\ndef f(a):\n    return a + x\n"}, known, texts
    )


ORDERED = ["test_part.py::a", "test_user.py::a", "test_other.py::a"]


@pytest.mark.parametrize(
    ("left_s", "taken"), [(0.0, 0), (0.5, 1), (1.0, 1), (1.5, 2), (3.0, 3), (9.0, 3)]
)
def test_tests_are_taken_until_their_times_add_up(left_s, taken):
    """The test that goes over the time is still run, and none after it."""
    tests = with_times(dict.fromkeys(ORDERED, 1.0))
    assert tests.within(ORDERED, left_s) == ORDERED[:taken]


def test_a_line_that_runs_at_import_is_first_shown_to_its_own_tests():
    """The file of the same word, then files that import the module; the rest comes after."""
    tests = with_times(dict.fromkeys(reversed(ORDERED), 0.1))
    at_import = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 1)
    assert tests.rounds(at_import) == [ORDERED[:2], ORDERED[2:]]


def test_tests_that_import_the_line_again_come_after_its_own_tests():
    """What a line that runs at import is for is not told by who imports it."""
    tests = with_times(dict.fromkeys(ORDERED, 0.1))
    tests.known["test_other.py"].lines["toy/part.py"]["1"].append(0)
    at_import = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 1)
    assert tests.rounds(at_import) == [[ORDERED[0], ORDERED[1]], [ORDERED[2]]]


def test_tests_that_run_the_line_come_before_the_others():
    """However the other file is called."""
    tests = with_times(dict.fromkeys(ORDERED, 0.1))
    in_function = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 3)
    assert tests.rounds(in_function) == [ORDERED[2:], ORDERED[:2]]


@pytest.mark.parametrize(
    "name", ["test_small_part.py::a", "test_toy.py::a", "test_public_api.py::a"]
)
def test_files_that_concern_the_module_by_name_come_before_others(name):
    """Where no file has its very name: it is a part of it, or the folder's, or all are meant."""
    tests = with_times(dict.fromkeys(["test_a.py::a", name, "test_z.py::a"], 0.1))
    in_function = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 3)
    assert tests.rounds(in_function)[0] == [name]


@pytest.mark.parametrize(("runs_it", "asked"), [(True, True), (False, False)])
def test_an_example_of_a_page_is_asked_with_all_before_it_or_not_at_all(runs_it, asked):
    """Alone it fails, as the names it uses are not there, and would catch every change."""
    page = [f"docs/page.md::line:{line},column:1" for line in (3, 9, 20)]
    tests = with_times(dict.fromkeys([*ORDERED, *page], 0.1))
    lines = tests.known["docs/page.md"].lines
    lines.clear()
    if runs_it:
        lines["toy/part.py"] = {"3": [1], "4": [1]}
    in_function = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 3)
    _, second = tests.rounds(in_function)
    assert [name for name in second if name.startswith("docs")] == (page if asked else [])


def test_a_second_round_is_not_begun_when_the_first_has_used_the_time():
    """What is left is counted, and no child is started for it."""
    tests, runs = with_times(dict.fromkeys(ORDERED, 1.0)), []
    mutant = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 3)

    class Recorded:
        def write(self, file, text):
            pass

        def run(self, args, **_):
            runs.append(args[-1])
            return Run("passed", "", 0.2)

    ended = [mutate.attempt(Recorded(), tests, mutant, left_s) for left_s in (0.9, 9.0)]
    assert ended == [("survived", "2 tests were not run"), ("survived", "")]
    assert runs == ["test_other.py", "test_other.py", "test_user.py"]


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


def test_the_page_has_a_row_for_each_distribution_that_was_run(told):
    """With the share of those that matter, and whether it is a lower bound."""
    text, _, root = told
    summary = json.loads((root / mutate.SUMMARY).read_text(encoding="utf-8"))
    count = summary["toy"]["count"]
    assert f"{sum(count.values())} tried: {count['caught']} caught" in text
    summary["other"] = summary["toy"] | {
        "count": {"caught": 90, "timed out": 4, "survived": 6, "equivalent": 50},
        "cut": 3,
    }
    page = mutation_page.page(summary, ["toy", "other", "another"])
    assert "| other | 150 | 90 | 4 | 6 | 50 | 94.0 % of 100 |" in page
    assert "| another | - | - | - | - | - | not run |" in page
    assert f"| toy | {sum(count.values())} | {count['caught']} |" in page
    assert "Lower bounds: 3 survived" in page


@pytest.mark.parametrize("options", [[], ["--package", "ckpt-wrap", "--page", "x"]])
def test_a_run_or_a_page_is_asked_for(options, capsys):
    """Neither both nor none."""
    with pytest.raises(SystemExit):
        mutate.main(options)
    assert "either --package or --page is needed" in capsys.readouterr().err
