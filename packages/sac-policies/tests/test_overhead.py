"""What the recipe engine costs in Python, counted: a clock would say what else the machine does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import sac_policies
from sac_policies.engines.recipe._proof import proof_of

from ._recipe import leaf, run

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


WEIGHTS = [leaf(16, 16) for _ in range(4)]


def _block(x: torch.Tensor) -> torch.Tensor:
    """Norms by hand, rotated halves, products and gates; what their nodes read is at edges."""
    for w in WEIGHTS:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        one, other = (y @ w).view(4, 4, 16).transpose(0, 1).chunk(2, -1)
        turned = torch.cat((-other, one), -1).transpose(0, 1).reshape(16, 16)
        x = x + F.silu(turned @ w) * y
    return x


def test_step_takes_few_calls_for_each_saved_tensor() -> None:
    """To decide on it and note its readers, then to rebuild it; the first forward is watched."""
    x, saved = leaf(16, 16), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda held: held):
        _block(x)
    run(_block, x)
    outs: list[torch.Tensor] = []
    assert _calls(lambda: outs.append(run(_block, x))) <= 38 * len(saved)
    assert _calls(lambda: outs.pop().sum().backward()) <= 22 * len(saved)
