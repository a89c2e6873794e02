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
from mutation_equivalent import Known, load

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
