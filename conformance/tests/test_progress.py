"""How far a run is: counted by area, and sparsely shown."""

from __future__ import annotations

import pytest

from torchparts_conformance.run import _progress
from torchparts_conformance.run._case_result import CaseResult


def test_progress_counts_areas_and_tells_the_time_left(registry, capsys, monkeypatch):
    """Ten of twelve cases run; what is only left out takes no time and is not waited for."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    entries = [CaseResult(f"c{n}", "cpu", (registry["CW-001"],), "pass") for n in range(12)]
    entries[5].outcome = "error"
    progress = _progress.Progress(is_told=True)
    progress.begins((entry, n >= 2) for n, entry in enumerate(entries))
    for n, entry in enumerate(entries[:8]):
        now[0] += 30.0 * (n >= 2)
        progress.ended(entry, ran=n >= 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[ 1/12] ckpt-wrap 1/12"
    assert lines[5] == "[ 6/12] ckpt-wrap 6/12, 1 wrong"
    assert lines[7] == "[ 8/12] ckpt-wrap 8/12, 1 wrong, about 2 min left"
    assert _progress.show(lines[7])
    assert not _progress.show("something a case printed [1/2]")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[ 1/41] a", False),
        ("[20/41] a", True),
        ("[21/41] a", False),
        ("[41/41] a", True),
        ("[ 40/900] a", True),
    ],
)
def test_file_gets_every_twentieth_line_and_the_last(capfd, line, shown):
    """Whether or not it is shown, it was a line of progress."""
    assert _progress.show(f"{line}\n")
    assert capfd.readouterr() == ("", f"{line}\n" if shown else "")


@pytest.mark.parametrize("line", ["", "[x/41] a", "a [20/41] ", "[20/41]a", "[20/1234567890] a"])
def test_other_line_is_not_shown(capfd, line):
    """Whoever asked does with it what it wants."""
    assert not _progress.show(line)
    assert capfd.readouterr() == ("", "")


def test_line_of_a_stranger_steers_no_terminal(capfd):
    """It is as long as a line of progress at most."""
    assert _progress.show("[20/41] \x1b[2J" + "x" * 200)
    said = capfd.readouterr().err
    assert "\x1b" not in said
    assert len(said) == 101
