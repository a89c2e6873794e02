"""The repeated blocks of a model are found, and the operators in each are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sac_policies.budget._repeating import Operators, called_again, inside, repeating

from ._blocks import Block, stack
from ._fitted import own_forwards

MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


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


def test_layers_that_are_shared_are_found_by_their_calls() -> None:
    """The outermost modules that run more than once; a module without children does not count."""
    model = Again()
    found = called_again(model, lambda: model(torch.ones(2, 24)))
    assert [path for path, _ in found] == ["shared.one"]
    assert called_again(model, lambda: model.shared["one"](torch.ones(2, 24))) == ()
    assert own_forwards(model) == []


def seen_in(model: nn.Module, regions: Any, *args: Any) -> Operators:
    """Run a model and record the operators in its regions."""
    with Operators(regions) as seen:
        model(*args)
    return seen


def test_costly_operators_are_seen_in_the_region_that_runs_them() -> None:
    """Matmuls are recorded; functions, and operators between regions, are not."""
    model = stack(2)
    seen = seen_in(model, repeating(model), torch.ones(4, 8))
    assert seen.of == {"blocks.0": {ADDMM: None}, "blocks.1": {ADDMM: None}}


def test_regions_are_in_the_order_in_which_they_begin() -> None:
    """The order is not that of their paths; a region that is never called is left out."""
    blocks = nn.ModuleList(nn.Sequential(nn.Tanh()) for _ in range(3))
    regions = [(str(at), block) for at, block in enumerate(blocks)]
    with Operators(regions) as seen:
        blocks[2](torch.ones(1))
        blocks[0](torch.ones(1))
        blocks[2](torch.ones(1))
    assert list(seen.of) == ["2", "0"]
    assert seen.of == {"2": {}, "0": {}}


def test_operator_is_of_the_innermost_region() -> None:
    """The outer region gets the operators before and after."""
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(nn.Linear(4, 4, bias=False), inner)
    seen = seen_in(outer, [("", outer), ("1", inner)], torch.ones(2, 4))
    assert seen.of == {"": {MM: None}, "1": {ADDMM: None}}


def test_region_that_raises_has_ended() -> None:
    """Later operators do not belong to the region."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    fails = Fails()
    with Operators([("fails", fails)]) as seen:
        with pytest.raises(ArithmeticError):
            fails(torch.ones(2, 2))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert seen.of == {"fails": {}}
