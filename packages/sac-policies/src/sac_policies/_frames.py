"""Pure: find the line of the user's code that is running."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
_NOT_FILES = ("<string>", "<frozen", "<eval_with_key>")


def user_line() -> str:
    """Return "file.py:12 in forward" of the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_inside(filename: str) -> bool:
    return filename.startswith(_INSIDE) or filename.startswith(_NOT_FILES)
