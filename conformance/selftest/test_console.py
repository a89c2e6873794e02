"""What is said on a terminal steers neither it nor whoever reads its log."""

from __future__ import annotations

import pytest

from torchparts_conformance import _console


@pytest.mark.parametrize("line", ["::error::x", "  ::set-output name=a::b", "##[command]x"])
def test_words_are_no_commands_of_continuous_integration(line):
    """What a log's reader would act on does not start a line."""
    assert not _console.shown(line).lstrip().startswith(("::", "##["))
    assert _console.shown(line).endswith(line)
