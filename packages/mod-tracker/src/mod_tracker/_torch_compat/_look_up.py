"""Finds a private name of torch, or that there is none."""

from __future__ import annotations

from typing import Any

import torch


def look_up(dotted: str) -> Any:
    """What torch has under a dotted name, or None."""
    found: Any = torch
    for part in dotted.split("."):
        if found is None:  # which has names of its own
            return None
        found = getattr(found, part, None)
    return found
