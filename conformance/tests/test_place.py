"""Where something was raised: the lines of case and adapter, without a folder of the machine."""

from __future__ import annotations

import pytest

from torchparts_conformance.run import _place


def _raise_in(path, depth):
    """Raise below `depth` calls that seem to be in a file."""
    code = compile("def f(g, n):\n    g(f, n)\n", str(path), "exec")
    space = {}
    exec(code, space)

    def down(f, n):
        if n == 0:
            raise ValueError("here")
        f(down, n - 1)

    try:
        space["f"](down, depth)
    except ValueError as error:
        return error


def test_place_names_the_line_of_the_case_and_of_the_adapter(tmp_path):
    """By the last folders, so that no folder of the machine is told."""
    case, adapter = tmp_path / "cases" / "ckpt_wrap" / "test_a.py", tmp_path / "mine.py"
    adapter.write_text('parts = {\n    "ckpt-wrap": 1,\n}\n')
    raised = _raise_in(case, 1)
    told = _place.place_of(raised, adapter, "ckpt-wrap", failed=True)
    assert told == f"adapter {tmp_path.name}/mine.py:2 > case ckpt_wrap/test_a.py:2"
    told = _place.place_of(raised, adapter, "ckpt-wrap", failed=False)
    assert told.startswith(f"adapter {tmp_path.name}/mine.py:2 > case ckpt_wrap/test_a.py:2 > ")
    assert told.rpartition(" > ")[2].startswith("tests/test_place.py:")
    assert (
        _place.place_of(_raise_in(tmp_path / "else.py", 1), adapter, "ckpt-wrap", failed=True) == ""
    )


def test_place_is_in_the_report(suite):
    """Of a failure, and of nothing that passed."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    suite.run()
    places = {row["id"]: row["where"] for row in suite.report()["rows"]}
    line = cases.read_text().splitlines().index("    assert part.answer == 41") + 1
    # The adapter names the area in its sixth line.
    folder = suite.root.name
    assert (
        places["CW-001"] == f"adapter {folder}/adapter.py:6 > case ckpt_wrap/test_cases.py:{line}"
    )
    assert places["CW-002"] == ""


LIBRARY = """
def breaks():
    raise ValueError("broken")

def claims():
    assert False, "wrong"
"""


@pytest.mark.parametrize(("name", "outcome"), [("breaks", "error"), ("claims", "fail")])
def test_error_says_where_it_was_raised_and_a_failure_what_was_claimed(suite, name, outcome):
    """What a false claim called last is no reason."""
    suite.write("library.py", LIBRARY)
    suite.write_case(f"import library\n    library.{name}()")
    suite.run()
    row = suite.report()["rows"][0]
    assert row["outcome"] == outcome
    assert row["where"].endswith("library.py:3") is (name == "breaks")
