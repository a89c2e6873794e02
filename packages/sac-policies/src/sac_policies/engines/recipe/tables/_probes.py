"""What rows of the tables of replay rules are written with: shapes to try them on, and short forms.

Of the shapes one width is such that no vector of a kernel divides it, and one that all do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._replay import Operand, Rule

ROWS, WIDTH, WIDE = 5, 67, 256
CHANNELS = 6
IMAGES, KERNELS = (2, CHANNELS, 9, 9), (CHANNELS, CHANNELS, 3, 3)

Make = Callable[..., torch.Tensor]
"""Makes a leaf tensor of a shape, `make(5, 67)`."""


def matrix(make: Make) -> torch.Tensor:
    """Make a leaf of ROWS by WIDTH."""
    return make(ROWS, WIDTH)


def of_one(
    kind: str, op: Any, through: Callable[..., torch.Tensor], *probes: Any, **more: Any
) -> Rule:
    """A row for nodes of one operand, which `through` takes after the node."""
    return Rule(kind, op, None, through=through, operands=(Operand(0),), edge_probes=probes, **more)
