"""Which tests are asked about a changed line, in which order, and for how long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
pytest.importorskip("coverage")
sys.path.insert(0, str(Path(__file__).parent))

import mutate
import mutation_tests
from mutation_points import sample
from mutation_trials import Run

ORDERED = ["test_part.py::a", "test_user.py::a", "test_other.py::a"]


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


def test_distributed_tests_are_asked_about_the_whole_of_a_folder_that_is_distributed():
    """A file of it may only be run by them, and say nothing of it."""
    tests = with_times(dict.fromkeys(ORDERED, 0.1))
    tests.known["test_other.py"].tests["test_other.py::a"]["dist"] = True
    mutant = next(m for m in sample(tests.source, 50, 0) if m.point.start[0] == 3)
    assert [len(names) for names in tests.rounds(mutant)] == [2, 0]
    tests.source["toy/_ranks.py"] = "import torch.distributed\n"
    assert [len(names) for names in tests.rounds(mutant)] == [1, 2]


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
