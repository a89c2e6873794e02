"""Find the line of the user's code that is running."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

# Ends with a separator: torchvision is not torch.
_INSIDE = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))
_NOT_FILES = ("<string>", "<frozen", "<eval_with_key>")


def user_line() -> str:
    """Return "file.py:12 in forward" of the innermost frame outside torch and this package."""
    frame = _user_frame()[0]
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def user_stacklevel() -> int:
    """Return the `stacklevel` for a warning at `user_line`."""
    return _user_frame()[1]


def _user_frame() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside, and its level as seen by the caller's caller."""
    frame: FrameType | None = sys._getframe(2)
    level = 1
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level


def _is_inside(filename: str) -> bool:
    return filename.startswith(_INSIDE) or filename.startswith(_NOT_FILES)
