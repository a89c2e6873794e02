"""Steps of random programs with writes that autograd does not record: state, and hidden writes.

No step writes without a new version number to a value that a node has saved: plain autograd would
read the written value, and a region the original one.

Each step takes a value and the state of its world: a table with rows as wide as the value, and an
average.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Step = Callable[[torch.Tensor, "State"], torch.Tensor]


class State:
    """Tensors that steps read and write; without gradients."""

    def __init__(self, size: int) -> None:
        self.average = torch.linspace(-1, 1, size)
        self.table = torch.randn(5, size)
        self.count = torch.zeros(())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        return [self.average, self.table, self.count]


def average(y: torch.Tensor, state: State) -> torch.Tensor:
    """Subtract a running average of the value."""
    with torch.no_grad():
        state.average.lerp_(y.mean(0), 0.2)
    return (y - state.average).tanh() * y


def counted(y: torch.Tensor, state: State) -> torch.Tensor:
    """Multiply by the number of calls, and count after that."""
    out = y * (1 + state.count)
    state.count += 1
    return out.sin()


def codebook(y: torch.Tensor, state: State) -> torch.Tensor:
    """Multiply by the nearest rows of a table, which are updated."""
    nearest = torch.cdist(y.detach(), state.table).argmin(1)
    found = state.table[nearest]
    state.table[nearest[0]].mul_(0.9)
    state.table.data.index_add_(0, nearest, y.detach(), alpha=0.1)
    return (y * found).cos()


def overwritten(y: torch.Tensor, state: State) -> torch.Tensor:
    """Overwrite the value and read the result."""
    state.average.copy_(y.detach()[0])
    return y.sigmoid() * state.average.clone()


def clamped(y: torch.Tensor, state: State) -> torch.Tensor:
    """Write to a value without a new version number before it is saved."""
    z = y * y
    z.data.clamp_(-0.5, 0.5)
    return z.tanh() * z


STEPS: tuple[Step, ...] = (average, counted, codebook, overwritten, clamped)
