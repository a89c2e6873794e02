"""The repeated blocks of a model are found, and their calls recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sac_policies.budget._repeating import Calls, called_again, inside, repeating
from sac_policies.budget._segments import Segment

from ._blocks import Block, stack
from ._fitted import own_forwards


class Mixture(nn.Module):
    """A block that contains experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))


class Translation(nn.Module):
    """Two stacks of blocks of one class."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(depth), stack(depth)


class Twice(nn.Module):
    """Two blocks, not in a container."""

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
            ["0.0", "0.1", "1.0"],
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [""]),
        (
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in "ab")),
            ["0", "1"],
        ),
        (lambda: nn.ModuleDict({"a": Mixture(), "b": Mixture()}), ["a", "b"]),
    ],
)
def test_blocks_are_the_outermost_modules_that_repeat(
    make: Callable[[], nn.Module], paths: list[str]
) -> None:
    """Containers and single layers are not blocks; modules of a block's class always are."""
    assert [path for path, _ in repeating(make())] == paths


def test_blocks_inside_of_regions_are_those_of_their_lists() -> None:
    """A block without a list remains; in the end no block contains others."""
    stages = [nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in "ab")}), Twice(), Block()]
    found = inside([(f"stages.{at}", stage) for at, stage in enumerate(stages)])
    assert [path for path, _ in found] == [
        *("stages.0.layers.0", "stages.0.layers.1"),
        *("stages.1.first", "stages.1.second"),
        "stages.2",
    ]
    assert inside(found) == ()


class Again(nn.Module):
    """Two layers that run three times, and one that runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleDict({"one": Block()})
        self.once, self.last = Block(), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.shared["one"](self.last(x))
        return self.once(x)


def calls_in(model: nn.Module, run: Callable[[], object]) -> Calls:
    """Record the calls of a step."""
    with Calls(model) as calls:
        run()
    assert own_forwards(model) == []
    return calls


def test_layers_that_are_shared_are_found_by_their_calls() -> None:
    """The outermost modules that run more than once; a module without children does not count."""
    model, x = Again(), torch.ones(2, 24)
    found = called_again(model, calls_in(model, lambda: model(x)))
    assert [path for path, _ in found] == ["shared.one"]
    assert called_again(model, calls_in(model, lambda: model.shared["one"](x))) == ()


def test_regions_are_in_the_order_in_which_they_begin() -> None:
    """The order is not that of their paths; a region that is never called is left out."""
    blocks = nn.ModuleList(nn.Sequential(nn.Tanh()) for _ in range(3))

    def run() -> None:
        for number in (2, 0, 2):
            blocks[number](torch.ones(1))

    ran = calls_in(blocks, run).ran((str(at), block) for at, block in enumerate(blocks))
    assert ran == ["2", "0"]


def test_segment_runs_where_its_children_do() -> None:
    """It is not called itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    segments = [(str(at), Segment(model, at, at + 2)) for at in (1, 0)]
    assert calls_in(model, lambda: model(torch.ones(2, 4))).ran(segments) == ["0", "1"]
