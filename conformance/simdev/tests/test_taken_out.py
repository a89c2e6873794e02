"""What is taken out is still there, so that the list is never about other code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import taken_out


@pytest.mark.parametrize("part", taken_out.PARTS, ids=lambda part: f"{part.package}-{part.name}")
def test_its_text_stands_there_once_and_what_stands_instead_is_python(part, tmp_path):
    """Its source without it can be compiled."""
    folder = taken_out.take_out(part, tmp_path)
    path = folder / part.file.split("/src/", 1)[1]
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
