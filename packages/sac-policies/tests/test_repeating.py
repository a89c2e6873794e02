"""The repeated blocks of a model are found, and the operators in each are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sac_policies.budget._repeating import Seen, called_again, inside, repeating

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


def seen_in(model: nn.Module, regions: Any, *args: Any) -> Seen:
    """Run a model and record the operators in its regions."""
    with Seen(regions) as seen:
        model(*args)
    return seen


def test_costly_operators_are_seen_in_the_region_that_runs_them() -> None:
    """Matmuls are recorded; functions, and operators between regions, are not."""
    model = stack(2)
    seen = seen_in(model, repeating(model), torch.ones(4, 8))
    assert seen.operators == {"blocks.0": {ADDMM: None}, "blocks.1": {ADDMM: None}}


def test_regions_are_in_the_order_in_which_they_begin() -> None:
    """The order is not that of their paths; a region that is never called is left out."""
    blocks = nn.ModuleList(nn.Sequential(nn.Tanh()) for _ in range(3))
    regions = [(str(at), block) for at, block in enumerate(blocks)]
    with Seen(regions) as seen:
        blocks[2](torch.ones(1))
        blocks[0](torch.ones(1))
        blocks[2](torch.ones(1))
    assert list(seen.operators) == ["2", "0"]
    assert seen.operators == {"2": {}, "0": {}}


def test_operator_is_of_the_innermost_region() -> None:
    """The outer region gets the operators before and after."""
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(nn.Linear(4, 4, bias=False), inner)
    seen = seen_in(outer, [("", outer), ("1", inner)], torch.ones(2, 4))
    assert seen.operators == {"": {MM: None}, "1": {ADDMM: None}}


def test_region_that_raises_has_ended() -> None:
    """Later operators do not belong to the region."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    fails = Fails()
    with Seen([("fails", fails)]) as seen:
        with pytest.raises(ArithmeticError):
            fails(torch.ones(2, 2))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert seen.operators == {"fails": {}}


@pytest.mark.parametrize("train", [True, False])
def test_region_that_changes_a_buffer_is_noted(train: bool) -> None:
    """Running statistics change only in training."""
    model = nn.Sequential(Block(), Block(norm=nn.BatchNorm1d)).train(train)
    seen = seen_in(model, repeating(model), torch.ones(4, 24))
    counted = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert seen.wrote == {"0": (), "1": counted if train else ()}


def test_buffer_that_is_another_is_a_change() -> None:
    """A module may replace a buffer by a new tensor."""

    class Averages(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x.mean().detach()
            return x

    model = Averages()
    model.register_buffer("mean", torch.zeros(()))
    assert seen_in(model, [("", model)], torch.ones(2)).wrote == {"": None}


def test_buffers_without_a_version_are_not_asked_for_one() -> None:
    """Inference tensors have no version."""
    model = nn.Sequential(nn.Tanh())
    with torch.inference_mode():
        model.register_buffer("table", torch.zeros(2))
    assert seen_in(model, [("", model)], torch.ones(1)).wrote == {"": ()}


def test_region_that_writes_to_what_it_is_given_is_noted() -> None:
    """Recomputation would read the changed input; also for keyword inputs and containers."""

    class Writes(nn.Module):
        def __init__(self, wrote: bool) -> None:
            super().__init__()
            self.inner, self.wrote = nn.Linear(4, 4), wrote

        def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
            if self.wrote:
                cache["seen"].add_(1)
            return self.inner(x)

    regions = [("writes", Writes(True)), ("reads", Writes(False))]
    with torch.inference_mode():
        frozen = torch.ones(4)
    with Seen(regions) as seen:
        for _, module in regions:
            module(torch.ones(4), cache={"seen": torch.zeros(2), "other": frozen})
    assert seen.rewrites == {"writes"}
