"""The command line: exit codes, one-line complaints, and a judge that cannot be ended."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys

import pytest

from torchparts_conformance.commands import _cli, _reports
from torchparts_conformance.render import _render
from torchparts_conformance.subject import _adapters

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
        ["predicate", path, "--out", tmp_path / "predicate.json"],
    ):
        assert _cli.main([str(word) for word in arguments]) in (0, 1)
    said = capsys.readouterr()
    shown = said.out + said.err
    assert "\N{REPLACEMENT CHARACTER}]0;owned" in shown
    assert not {"\x1b", "\x07", "\u202e", "\ud800"} & set(shown)
    assert "\nfine: conformant" not in shown
    written = {path.name for path in (tmp_path / "badges").iterdir()}
    assert written == {"badge-ckpt-wrap.json", "badge-ckpt-wrap.svg"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["verify"], "required: report"),
        (["verify", "no-such-file.json"], "report 'no-such-file.json' cannot be read"),
        (["doctor", "nobody"], "implementation 'nobody' is unknown"),
        (["doctor", "no_such_module:x"], "raised ModuleNotFoundError"),
        (["matrix", "no-such-file.json"], "cannot be read"),
        (["mutants", "nowhere", "--area", "wheels"], "--area 'wheels' is unknown"),
        (["mutants", "nowhere", "--jobs", "0"], "--jobs 0 asked for, but at least 1 is needed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(arguments, said, capsys):
    """No traceback, whatever was typed."""
    try:
        code = _cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 4
    assert said in error
    assert error.count("\n") == 1


def test_folder_that_cannot_be_made_is_exit_code_4(tmp_path, capsys):
    """Before any case runs it is known whether the results can be kept."""
    (tmp_path / "file").write_text("")
    assert _cli.main(["run", "--impl", "torch", "--out", str(tmp_path / "file")]) == 4
    path = tmp_path / "file"
    assert capsys.readouterr().err == (
        f"torchparts-conformance: {path} cannot be used: File exists. Name another.\n"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no room"), "a file cannot be used: no room. Name another.\n"),
        (OSError(28, "No space left on device", "x"), "x cannot be used: No space left on device."),
    ],
)
def test_error_of_the_system_is_one_line(stored, monkeypatch, capsys, error, said):
    """It names the file where the system does, and says what the system says."""

    def fail(*_):
        raise error

    monkeypatch.setattr(_reports._diff, "compare", fail)
    report = str(stored() / "report.json")
    assert _cli.main(["diff", report, report]) == 4
    assert capsys.readouterr().err.startswith(f"torchparts-conformance: {said}")


def test_badge_of_an_earlier_run_does_not_outlive_a_failed_one(stored):
    """A run that comes to nothing leaves nothing that shows success."""
    folder = stored()
    (folder / "badge.svg").rename(folder / "badge-ckpt-wrap.svg")
    assert _cli.main(["run", "--impl", "nobody", "--out", str(folder)]) == 4
    assert list(folder.iterdir()) == []


def test_interruption_is_one_line(stored, monkeypatch, capsys):
    """Ctrl-C ends a command without a traceback, and not with success."""
    monkeypatch.setattr(_reports._diff, "compare", lambda *_: signal.raise_signal(signal.SIGINT))
    report = str(stored() / "report.json")
    # A process that a shell starts in the background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert _cli.main(["diff", report, report]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "torchparts-conformance: interrupted\n"


def test_reader_that_goes_away_is_no_error():
    """`trace | head` says nothing on standard error."""
    command = [sys.executable, "-m", "torchparts_conformance", "trace"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_list_names_what_is_shipped(capsys):
    """Ours, torch's own two and four others have short names."""
    assert _cli.main(["list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    shipped = {"ours", "torch", "fsdp2", "fairscale", "xformers", "torch-remat", "torchtune"}
    assert shipped <= set(listed)
    assert f"torch {importlib.metadata.version('torch')}" in listed["torch"]


def test_list_says_what_is_not_installed(capsys, monkeypatch):
    """And what of several is there, by version."""
    wanted = {"ours": ("pytest", "no-such-thing"), "torch": ("pytest", "pluggy")}
    monkeypatch.setattr(_adapters, "DISTRIBUTIONS", wanted)
    assert _cli.main(["list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "not installed: no-such-thing" in listed["ours"]
    assert f"pytest {pytest.__version__}; pluggy " in listed["torch"]


def test_entry_point_gives_a_short_name(tmp_path, monkeypatch, capsys):
    """An installed distribution's adapter is listed, and run by its name."""
    _render.write(tmp_path / "theirs-1.0.dist-info" / "METADATA", "Name: theirs\nVersion: 1.0\n")
    point = "[torchparts.conformance]\ntheirs = their_adapter:implementation\n"
    _render.write(tmp_path / "theirs-1.0.dist-info" / "entry_points.txt", point)
    adapter = "from torchparts_conformance import Implementation\nimplementation = "
    _render.write(tmp_path / "their_adapter.py", f"{adapter}Implementation('theirs', '1.0')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _cli.main(["list"]) == 0
    listed = "theirs         entry point  theirs 1.0  (their_adapter:implementation)"
    assert listed in capsys.readouterr().out
    assert _cli.main(["doctor", "theirs"]) == 0
    assert "theirs 1.0, protocol 1" in capsys.readouterr().out


def test_doctor_finds_an_adapter_beside_it(tmp_path, monkeypatch, capsys):
    """The command looks in the working directory, as a run does, wherever it is installed."""
    adapter = "from torchparts_conformance import Implementation\nimplementation = "
    _render.write(tmp_path / "beside.py", f"{adapter}Implementation('beside', '1.0')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert _cli.main(["doctor", "beside:implementation"]) == 0
    assert "beside 1.0, protocol 1" in capsys.readouterr().out


def test_badge_that_is_too_large_is_exit_code_4(stored, capsys):
    """A stranger's file is bounded before it is read."""
    folder = stored()
    (folder / "huge.svg").write_text("x" * (_reports.MAX_BADGE_BYTES + 1))
    assert _cli.main(["verify", str(folder / "report.json"), str(folder / "huge.svg")]) == 4
    assert "badge 'huge.svg' exceeds 65536 bytes" in capsys.readouterr().err


KILLER = """
import os
from torchparts_conformance import Implementation

class Part:
    def __getattr__(self, name):
        os._exit(0)

impl = Implementation("killer", "1", parts={"mod-tracker": Part()})
"""


@pytest.mark.slow
def test_implementation_that_ends_the_process_is_not_conformant(tmp_path):
    """The judge is another process than the one that runs a stranger's code."""
    (tmp_path / "killer.py").write_text(KILLER)
    ended = _run(tmp_path, "run", "--impl", "killer:impl", "--area", "mod-tracker")
    assert ended.returncode == 1
    assert "the run ended without a report" in ended.stderr


@pytest.mark.slow
def test_adapter_that_cannot_be_imported_is_exit_code_4(tmp_path):
    """The whole complaint is one line that names the cause."""
    (tmp_path / "broken.py").write_text("import a_module_nobody_has\n")
    ended = _run(tmp_path, "run", "--impl", "broken:impl", "--area", "mod-tracker")
    assert ended.returncode == 4
    assert "No module named 'a_module_nobody_has'" in ended.stderr
    assert ended.stderr.strip().count("\n") == 0


def _run(folder, *arguments):
    command = [sys.executable, "-m", "torchparts_conformance", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
