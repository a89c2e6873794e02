"""The options of a run: a mistake is told at once, and what was parsed can be given again."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from torchparts_conformance.commands import _cli
from torchparts_conformance.run import _options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--explain", "CW-19"], "--explain 'CW-19' is unknown, but a requirement is named by its"),
        (["--explain", "speed"], "--explain 'SPEED' is unknown"),
        (["--area", "wheels"], "--area 'wheels' is unknown"),
        (["--device", "tpu"], "--device 'tpu' is unknown"),
        (["--profile", "speed"], "--profile 'speed' is unknown"),
        (["--case-limit", "0"], "--case-limit 0 asked for"),
    ],
)
def test_mistake_in_an_option_is_not_hidden_by_a_missing_one(options, said, capsys, monkeypatch):
    """No implementation is given, but the mistake is what is told."""
    monkeypatch.delenv("TORCHPARTS_IMPL", raising=False)
    assert _cli.main(["run", *options]) == 4
    assert said in capsys.readouterr().err


def test_all_wrong_values_are_told_at_once(capsys):
    """In one line: none hides another, whether two options are wrong or two words of one."""
    wrong = ["--area", "nonsense,wheels", "--device", "nonsense", "--profile", "speed"]
    assert _cli.main(["run", "--impl", "torch", *wrong, "--order", "x", "--case-limit", "0"]) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for words in (
        "--area 'nonsense', 'wheels' is unknown",
        "--device 'nonsense' is unknown",
        "--profile 'speed' is unknown",
        "--order 'x' is unknown",
        "--case-limit 0 asked for",
    ):
        assert words in said


def _parsed(*words):
    parser = argparse.ArgumentParser()
    for option in _options.OPTIONS:
        option.add_to(parser.add_argument)
    return parser.parse_args(words)


def test_what_was_parsed_can_be_given_again():
    """Types and words with spaces or signs are what they were."""
    words = ["--impl", "a:b c", "--known-failures", "x=y.toml", "--case-limit", "0.5"]
    parsed = _parsed(*words, "--order=seed:3", "--device=cpu,cuda")
    assert parsed.known_failures == Path("x=y.toml")
    assert parsed.case_limit == 0.5
    assert _parsed(*_options.arguments(parsed)) == parsed


def test_option_without_a_value_is_not_given_again():
    """The others have their defaults."""
    given = _options.arguments(_parsed())
    assert not [word for word in given if word.startswith(("--impl", "--known-failures"))]
    assert {"--area=all", "--device=cpu", "--profile=all", "--order=listed"} <= set(given)
    assert f"--case-limit={_options.CASE_LIMIT_S}" in given


def test_flag_is_written_with_hyphens():
    """The name is a word of Python, the flag one of a command line."""
    assert _options.Option("known_failures", "").flag == "--known-failures"
