"""A case's fingerprint changes with what the case depends on, and with nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchparts_conformance.requirements._case_text import fingerprint

BESIDE = "def shared(x):\n    return x\n\n\ndef other():\n    return 1\n"
FILE = '''"""Cases."""

import math

from torchparts_conformance.cases.mod_tracker._models import shared as same

LIMIT = 3


def helper():
    return same(LIMIT)


@mark("MT-001")
def test_one(part):
    assert helper() < math.pi


def test_two(part):
    assert part
'''


@pytest.fixture
def folder(tmp_path):
    """Give a folder of cases with a file and one beside it."""
    made = tmp_path / "cases" / "mod_tracker"
    made.mkdir(parents=True)
    (made / "_models.py").write_text(BESIDE)
    (made / "test_a.py").write_text(FILE)
    return made


def _both(folder, file=FILE, beside=BESIDE):
    (folder / "_models.py").write_text(beside)
    (folder / "test_a.py").write_text(file)
    return [fingerprint(folder / "test_a.py", name) for name in ("test_one", "test_two")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("< math.pi", "<= math.pi"),
        ('@mark("MT-001")', '@mark("MT-002")'),
        ("LIMIT = 3", "LIMIT = 4"),
        ("return same(LIMIT)", "return same(LIMIT) + 0"),
        ("import math", "import cmath as math"),
    ],
)
def test_what_a_case_names_counts_for_it_alone(folder, old, new):
    """Its own lines, its decorators, and what it reaches through names."""
    before, after = _both(folder), _both(folder, FILE.replace(old, new))
    assert (before[0] == after[0], before[1] == after[1]) == (False, True)


def test_file_beside_counts_where_it_is_used(folder):
    """What is imported from it counts, the rest of it does not."""
    before = _both(folder)
    used = _both(folder, beside=BESIDE.replace("return x", "return x + 0"))
    unused = _both(folder, beside=BESIDE.replace("return 1", "return 2"))
    assert (before[0] == used[0], before[1] == used[1]) == (False, True)
    assert before == unused


def test_line_ends_order_and_docstring_of_the_file_do_not_count(folder):
    """The text of a case is the same on every system, wherever in its file it stands."""
    before = _both(folder)
    first, second = FILE.split('@mark("MT-001")')
    one, two = second.split("def test_two")
    moved = f'{first}def test_two{two}\n\n@mark("MT-001"){one}'
    assert _both(folder, moved) == before
    assert _both(folder, FILE.replace('"""Cases."""', '"""More cases."""')) == before
    (folder / "test_a.py").write_bytes(FILE.replace("\n", "\r\n").encode())
    assert [fingerprint(folder / "test_a.py", n) for n in ("test_one", "test_two")] == before


def test_statement_without_a_name_counts_for_every_case(folder):
    """A call at the top of a file may change anything."""
    before, after = _both(folder), _both(folder, FILE + "\n\nprint()\n")
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_lost_case_is_a_key_error(folder):
    """A function that is not there has no text."""
    with pytest.raises(KeyError, match="test_three"):
        fingerprint(folder / "test_a.py", "test_three")


@settings(deadline=None)  # a busy machine is slow
@given(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=6), change=st.integers(0, 5))
def test_chain_of_helpers_counts_to_its_end(tmp_path_factory, numbers, change):
    """Whatever link of a chain of functions changes, the case at its head changes."""
    path = tmp_path_factory.mktemp("chain") / "test_chain.py"

    def text(values):
        links = [f"def f{n}():\n    return f{n + 1}() + {v}\n" for n, v in enumerate(values)]
        return (
            f"def test_it():\n    f0()\n\n{''.join(links)}\ndef f{len(values)}():\n    return 0\n"
        )

    path.write_text(text(numbers))
    before = fingerprint(path, "test_it")
    at = change % len(numbers)
    path.write_text(text([*numbers[:at], numbers[at] + 10, *numbers[at + 1 :]]))
    assert fingerprint(path, "test_it") != before
