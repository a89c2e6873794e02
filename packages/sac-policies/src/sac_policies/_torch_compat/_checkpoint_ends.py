"""How torch's checkpoint ends: its second run early, and before 2.13 with modes left behind."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def leave_checkpoints(error: BaseException) -> None:
    """Leave the contexts of the checkpoints that `error` went through.

    Before torch 2.13 their generators, with modes and hooks, stay entered as long as the traceback
    lives. Lost where torch names its generator otherwise: just that.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            left = frame.f_locals.get("gen")
            if isinstance(left, types.GeneratorType):
                left.close()


def stops_early() -> bool:
    """Whether a second run ends with the last value that is needed: torch's setting, now.

    Without the name behind it: yes, as where nothing is set.
    """
    return getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None) is not False


def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run torch's checkpoint, whose contexts end where it raises. Fallback: `leave_checkpoints`."""
    try:
        return torch.utils.checkpoint.checkpoint(function, *args, **options)
    except BaseException as error:
        leave_checkpoints(error)
        raise
