"""What is said on a terminal steers neither it nor whoever reads its log."""

from __future__ import annotations

import pytest

from torchparts_conformance import _console


@pytest.mark.parametrize("line", ["::error::x", "  ::set-output name=a::b", "##[command]x"])
def test_words_are_no_commands_of_continuous_integration(line):
    """What a log's reader would act on does not start a line."""
    assert not _console.shown(line).lstrip().startswith(("::", "##["))
    assert _console.shown(line).endswith(line)


@pytest.mark.parametrize("sign", ["\n", "\r", "\t", "\x1b", "\x07", "\u202e", "\ud800", "\x9b"])
def test_sign_that_nobody_sees_is_replaced(sign):
    """One for one, so that a line stays one line."""
    assert _console.shown(f"a{sign}b") == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("line", ["a :: b", "plain: é ☃ 漢", "", "# heading", ":one"])
def test_line_that_steers_nothing_is_shown_as_it_is(line):
    """What is a command at the start of a line is none within it."""
    assert _console.shown(line) == line


def test_line_is_said_where_it_belongs(capsys):
    """What is wrong is on standard error; each argument is a line."""
    _console.say("a", "b\nc")
    _console.say("d", is_wrong=True)
    assert capsys.readouterr() == ("a\nb\N{REPLACEMENT CHARACTER}c\n", "d\n")


def test_code_of_a_failure_is_given_only_where_something_is_wrong(capsys):
    """A line for each."""
    assert _console.fail([], 4) == 0
    assert _console.fail(iter(["a", "b"]), 4) == 4
    assert capsys.readouterr() == ("", "a\nb\n")


def test_exit_codes_are_told_apart():
    """And none is the 2 with which Python's own parser of options ends."""
    codes = [
        _console.CONFORMANT,
        _console.NOT_CONFORMANT,
        _console.NO_DEVICE,
        _console.BAD_INPUT,
        _console.SUITE_BROKEN,
    ]
    assert len(set(codes)) == len(codes)
    assert 2 not in codes
