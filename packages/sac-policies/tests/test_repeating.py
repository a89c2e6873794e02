"""The blocks that a model is a stack of are found, and what runs in each is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from sac_policies.budget._repeating import repeating

from ._blocks import Block, stack


class Mixture(nn.Module):
    """A block with experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))


class Translation(nn.Module):
    """Two stacks of one class."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(depth), stack(depth)


class Twice(nn.Module):
    """Two blocks, in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (
            Translation,
            ["encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.1"],
        ),
        (lambda: nn.Sequential(Twice()), ["0.first", "0.second"]),
        (stack, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (lambda: nn.Sequential(Mixture(), nn.Linear(2, 2), Mixture()), ["0", "2"]),
        (lambda: nn.Sequential(Mixture()), ["0.experts.0", "0.experts.1", "0.experts.2"]),
        (
            lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block())),
            ["0.0", "0.1"],
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [""]),
        (lambda: nn.ModuleDict({"a": Mixture(), "b": Mixture()}), ["a", "b"]),
    ],
)
def test_blocks_are_the_outermost_modules_that_repeat(
    make: Callable[[], nn.Module], paths: list[str]
) -> None:
    """Containers and single layers are none."""
    assert [path for path, _ in repeating(make())] == paths
