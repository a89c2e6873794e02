"""What the recipe engine costs in Python, counted: a clock would say what else the machine does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sac_policies
from sac_policies.engines.recipe._proof import proof_of

OURS = str(Path(sac_policies.__file__).parent)


def _calls(function: Callable[[], Any]) -> int:
    """How many functions of the package are called, and generators of it resumed."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_proof_takes_few_calls() -> None:
    """There is one for each recipe, and one more when it is read."""
    assert _calls(lambda: proof_of(torch.ones(65536))) <= 5
