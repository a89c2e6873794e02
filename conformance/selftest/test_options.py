"""The options of a run: a mistake is told at once, and what was parsed can be given again."""

from __future__ import annotations

import pytest

from torchparts_conformance.commands import _cli


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
