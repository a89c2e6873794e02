"""Optimizer state that is not cut, such as a count of steps, is saved by one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from flat_param import ParameterError, ParamSpec, plan_layout, plan_shard
from flat_param.checkpoint._optim_state import NamedParam, optimizer_params
from flat_param.layout._boundary import Boundary
from flat_param.layout._param_shard import make_param_shards

SHAPES = ((4, 3), (), (0, 3), (5,), (1,), (2, 7))
LAYOUT = plan_layout([ParamSpec(str(n), shape, torch.float32) for n, shape in enumerate(SHAPES)])


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("boundary", ["element", "row", "tensor"])
def test_one_rank_speaks_for_each_parameter(boundary: str, world: int) -> None:
    """The one that has its beginning; of a parameter without elements, the first."""
    plan = plan_shard(LAYOUT, world_size=world, boundary=cast(Boundary, boundary))
    speakers: dict[str, list[int]] = {spec.name: [] for spec in LAYOUT.specs}
    for rank in range(world):
        pieces = make_param_shards(plan, rank)
        comms = SimpleNamespace(gather=SimpleNamespace(rank=rank))
        part = SimpleNamespace(comms=comms, pieces=pieces)
        for index, piece in enumerate(pieces):
            site = SimpleNamespace(part=part, index=index)
            named = NamedParam(piece.spec.name, torch.empty(0), site)  # type: ignore[arg-type]
            if named.speaks:
                speakers[piece.spec.name].append(rank)
                assert piece.start == 0
    assert all(len(ranks) == 1 for ranks in speakers.values()), speakers
    assert speakers["2"] == [0]


def test_what_has_no_groups_is_no_optimizer() -> None:
    """Such as its name."""
    with pytest.raises(ParameterError, match="optimizer is a str, but it must have the groups"):
        optimizer_params(torch.nn.Linear(2, 2), "adam")  # type: ignore[arg-type]
