"""The list of what is taken out is of the source as it is, and nothing of the source is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import places
import taken_out

REGION = "sac-policies/src/sac_policies/engines/recipe/regions/_region.py"
COMM = "flat-param/src/flat_param/comm/_comm.py"
WATCH = "mod-tracker/src/mod_tracker/reports/_operator_watch.py"
AHEAD = "flat-param/src/flat_param/dcp/_read_ahead.py"
# What the search finds and nobody waits by, and why.
NO_WAITS = {
    f"{REGION}: self.products.wait(tensor, held, number, self._is_result)": "is asked later",
    f"{COMM}: wait_here(self.trail, pending.label, pending.number)": "puts a wait into words",
    f"{WATCH}: threading.Condition()": "its waits have rows, and need it",
    f"{AHEAD}: threading.Condition()": "its waits have rows, and need it",
}


def unlisted(file: str, source: str) -> list[str]:
    """Places of a file that no row takes out, in words."""
    there = places.places(source)
    rows = [part for part in taken_out.PARTS if part.file == file and part.old in source]
    found = {place for part in rows for place in places.taken(source, part.old, part.new)}
    made = {place.lock for place in there if place.makes_lock}
    return [
        f"{file}: {place.text}"
        for place in there
        if place not in found and f"{file}: {place.text}" not in NO_WAITS
        # A lock that is entered is listed where it is made.
        if place.makes_lock or not place.lock or place.lock not in made
    ]


def sources() -> dict[str, str]:
    """Every file of the packages, by its path."""
    packages = taken_out.PACKAGES
    files = sorted(packages.glob("*/src/**/*.py"))
    return {path.relative_to(packages).as_posix(): path.read_text("utf-8") for path in files}


@pytest.mark.parametrize("part", taken_out.PARTS, ids=str)
def test_its_text_stands_there_once_and_what_stands_instead_is_python(part):
    """Its source without it can be compiled, and the tests that are to notice are there."""
    compile(taken_out.without(part), part.file, "exec")
    assert all((taken_out.ROOT / each.partition("::")[0]).is_file() for each in part.tests)


def test_every_wait_event_record_and_lock_is_in_the_list():
    """Whoever adds one adds a row, and a test that fails without it."""
    missing = [each for file, source in sources().items() for each in unlisted(file, source)]
    assert missing == []


def test_what_is_left_out_is_still_there():
    """An exception that nothing needs any more is none."""
    found = {
        f"{file}: {place.text}"
        for file, source in sources().items()
        for place in places.places(source)
    }
    assert found >= NO_WAITS.keys()


def test_names_of_rows_are_told_apart():
    """Each is asked for by its name, and its row of the page is found by it."""
    assert len(set(map(str, taken_out.PARTS))) == len(taken_out.PARTS)


NEW = [
    "stream.wait_stream(other)",
    "stream.wait_event(event)",
    "work.wait()",
    "self._copy\\\n        .wait(\n        30)",
    "event = stream.record_event()",
    "event.record(stream)",
    "tensor.record_stream(stream)",
    "torch.accelerator.synchronize()",
    "getattr(torch, kind).synchronize()",
    "if event.query(): pass",
    "later = handle.wait",
    "torch.accelerator.set_stream(stream)",
    "with at_home(stream): pass",
    "with stream: pass",
    "with self._on_stream(device): pass",
    "lock = threading.Lock()",
    "lock: Any = RLock()",
    "changed = threading.Condition()",
    "with some_lock: pass",
    "thread.join()",
    "thread.join(timeout=3)",
    "future.result()",
    "concurrent.futures.wait([future])",
    "dist.barrier()",
    "pool.shutdown()",
]


@pytest.mark.parametrize("line", NEW)
def test_a_new_one_without_a_row_is_found(line):
    """However it is spelled."""
    file = "flat-param/src/flat_param/offload/_mover.py"
    source = sources()[file] + f"\n\ndef new(self):\n    {line}\n"
    assert len(unlisted(file, source)) == 1


@pytest.mark.parametrize(
    "line",
    ['words = ", ".join(names)', "found = future.result()", "class Lock: pass", "waiting = 3"],
)
def test_other_words_are_no_places(line):
    """Values that are waited for cannot be had without it, so nobody can forget the wait."""
    assert places.places(line) == []


def test_a_second_one_of_the_same_words_is_found():
    """A row takes one place out, and not all that read alike."""
    file = "flat-param/src/flat_param/memory/_home_stream.py"
    source = sources()[file] + "\n\ndef new(around, stream):\n    around.wait_stream(stream)\n"
    assert unlisted(file, source) == [f"{file}: around.wait_stream(stream)"]


def test_a_row_that_leaves_its_place_is_no_row_of_it():
    """What stands near it, or is written another way, was not taken out."""
    source = "stream.wait_stream(other)\nstream.add()\n"
    assert (
        places.taken(source, "wait_stream(other)\nstream.add", "wait_stream(other)\nstream.x") == []
    )
    (gone,) = places.taken(source, "stream.wait_stream(other)\n", "")
    assert gone.text == "stream.wait_stream(other)"


def test_a_page_has_a_row_for_each():
    """Rows that are run now are written in the list's order, and the others stay."""
    page = (taken_out.HERE / "README.md").read_text(encoding="utf-8")
    table = page.partition(taken_out.BEGIN)[2].partition(taken_out.END)[0]
    rows = {match[1]: match[0] for match in taken_out.ROW.finditer(table)}
    assert list(rows) == [*map(str, taken_out.PARTS)]
    assert [row for row in rows.values() if "**nothing" in row] == []


def test_a_row_is_written_between_the_marks(tmp_path):
    """One that is gone from the list goes from the page."""
    page = tmp_path / "page.md"
    first, second = map(str, taken_out.PARTS[:2])
    old = f"| {first} | `test_a` |\n| gone: away | `test_b` |\n| {second} | `test_c` |\n"
    page.write_text(f"before\n{taken_out.BEGIN}{old}{taken_out.END}\nafter\n")
    taken_out.write(page, [f"| {second} | `test_d` |\n"])
    told = page.read_text()
    assert told.startswith("before\n")
    assert told.endswith("after\n")
    rows = [f"| {first} | `test_a` |", f"| {second} | `test_d` |"]
    assert [line for line in told.splitlines() if "test_" in line] == rows
