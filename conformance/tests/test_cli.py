"""The command line: exit codes, and complaints of one line."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from torchparts_conformance.commands import _cli, _reports


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
        (["mutants", "nowhere", "--requirement", "CW-001,speed"], "--requirement 'SPEED' is unk"),
        (
            ["mutants", "nowhere", "--requirement", "CW-001", "--area", "ckpt-wrap"],
            "--requirement was given with --area. Give one of them",
        ),
        (["mutants", "nowhere", "--jobs", "0"], "--jobs is 0; it must be at least 1"),
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("submit report.json --contakt x", "'--contakt' is unknown, but --contact is near"),
        (
            "run --imlp=ours --aera x",
            "'--imlp' is unknown, but --impl is near; "
            "option '--aera' is unknown, but --area is near",
        ),
        ("run --nothing-like-it", "is unknown, but --help lists those that are known"),
        ("run --area a --area b", "--area is given 2 times, but one value is used"),
        ("recheck x --python y --pyt z", "--python is given 2 times"),
    ],
)
def test_wrong_options_are_told_first_and_all(capsys, given, said):
    """Though something is missing, or wrong, beside them."""
    with pytest.raises(SystemExit) as ended:
        _cli.main(given.split())
    err = capsys.readouterr().err
    assert ended.value.code == 4
    assert said in err
    assert err.count("\n") == 1


def test_value_that_looks_like_an_option_is_none(capsys):
    """As what is passed on to pip does; `--install` may be given several times."""
    given = ["recheck", "none", "--pip-options", "--find-links wheels"]
    assert _cli.main([*given, "--install", "a", "--install", "b"]) == 4
    assert "entry 'none' cannot be read" in capsys.readouterr().err
