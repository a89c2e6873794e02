"""The commands that read reports: what they believe, refuse and write, and their exit codes."""

from __future__ import annotations

import json

import pytest

from torchparts_conformance.commands import _cli, _reports

pytestmark = pytest.mark.usefixtures("known_suite")


def test_verify_believes_an_honest_report(stored, capsys):
    """Exit code 0, and a line that claims no more than was checked."""
    folder = stored()
    assert _cli.main(["verify", str(folder / "report.json"), str(folder / "badge.svg")]) == 0
    assert "mine: conformant, nothing contradicts it" in capsys.readouterr().out


def test_verify_refuses_a_swapped_badge(stored, capsys):
    """Exit code 1, and the reason."""
    better, worse = stored("a"), stored("b", outcomes={"CW-001": "fail"})
    assert _cli.main(["verify", str(worse / "report.json"), str(better / "badge.svg")]) == 1
    assert "the badge is not the one this report gives" in capsys.readouterr().err


def test_verify_refuses_a_truncated_report_with_exit_code_4(stored, capsys):
    """A file that cannot be read is bad input, in one line."""
    path = stored() / "report.json"
    path.write_text(path.read_text()[:300])
    assert _cli.main(["verify", str(path)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("torchparts-conformance: report 'report.json' is no whole JSON file")
    assert error.count("\n") == 1


def test_verify_refuses_a_report_of_another_suite_with_exit_code_4(stored, capsys):
    """A report of another version is not judged."""
    path = stored() / "report.json"
    path.write_text(path.read_text().replace('"version":"0.1.0"', '"version":"7.7.7"'))
    assert _cli.main(["verify", str(path)]) == 4
    assert "report is of suite '7.7.7'" in capsys.readouterr().err


def test_verify_rerun_does_not_let_the_report_choose_the_code(stored, capsys):
    """Which adapter is imported is said by whoever verifies."""
    assert _cli.main(["verify", str(stored() / "report.json"), "--rerun"]) == 4
    assert "--rerun was given without --impl, but a report" in capsys.readouterr().err


def test_diff_blocks_a_regressed_must(stored, capsys):
    """Exit code 1 exactly when a MUST regressed."""
    good, bad = (
        stored("a") / "report.json",
        stored("b", outcomes={"CW-001": "fail"}) / "report.json",
    )
    assert _cli.main(["diff", str(good), str(bad)]) == 1
    assert "regressed CW-001 MUST" in capsys.readouterr().out
    assert _cli.main(["diff", str(bad), str(good)]) == 0
    assert _cli.main(["diff", str(good), str(good)]) == 0


def test_badge_and_matrix_are_written_from_reports(stored, tmp_path):
    """The same report gives the same bytes."""
    report = str(stored() / "report.json")
    for folder in ("x", "y"):
        assert _cli.main(["badge", report, "--out", str(tmp_path / folder)]) == 0
    names = ["badge-ckpt-wrap.json", "badge-ckpt-wrap.svg"]
    assert all(
        (tmp_path / "x" / n).read_bytes() == (tmp_path / "y" / n).read_bytes() for n in names
    )
    page = tmp_path / "matrix.html"
    assert _cli.main(["matrix", report, "--html", str(page)]) == 0
    assert "mine 1.0" in page.read_text()


EVIL = "x\nfine: conformant\x1b]0;owned\x07\x1b[2J\u202e\ud800<b>../../etc"


def test_words_of_a_report_do_not_steer_the_terminal(stored, tmp_path, capsys):
    """Control characters, text that runs backwards and half characters are shown as text."""
    path = stored("evil", name=EVIL, reason=EVIL, outcomes={"CW-001": "fail"}) / "report.json"
    other = stored("good") / "report.json"
    edited = tmp_path / "edited.json"
    edited.write_text(path.read_text().replace("test_a.py", json.dumps(EVIL)[1:-1]))
    for arguments in (
        ["verify", path],
        ["verify", edited],
        ["diff", edited, other],
        ["matrix", path, "--html", tmp_path / "m.html", "--markdown", tmp_path / "m.md"],
        ["badge", path, "--out", tmp_path / "badges"],
    ):
        assert _cli.main([str(word) for word in arguments]) in (0, 1)
    said = capsys.readouterr()
    shown = said.out + said.err
    assert "\N{REPLACEMENT CHARACTER}]0;owned" in shown
    assert not {"\x1b", "\x07", "\u202e", "\ud800"} & set(shown)
    assert "\nfine: conformant" not in shown
    written = {path.name for path in (tmp_path / "badges").iterdir()}
    assert written == {"badge-ckpt-wrap.json", "badge-ckpt-wrap.svg"}


def test_badge_that_is_too_large_is_exit_code_4(stored, capsys):
    """A stranger's file is bounded before it is read."""
    folder = stored()
    (folder / "huge.svg").write_text("x" * (_reports.MAX_BADGE_BYTES + 1))
    assert _cli.main(["verify", str(folder / "report.json"), str(folder / "huge.svg")]) == 4
    assert "badge 'huge.svg' exceeds 65536 bytes" in capsys.readouterr().err
