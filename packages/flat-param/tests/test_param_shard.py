"""Pieces of parameters: what shape each rank's optimizer sees, and that nothing is lost."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from flat_param import Blocks
from flat_param.layout._boundary import Boundary
from flat_param.layout._param_shard import ParamShard, make_param_shards
from flat_param.plan import ParamSpec, plan_layout, plan_shard

SHAPES = {"matrix": (4, 3), "scale": (), "vector": (5,), "cube": (2, 3, 2)}
SPECS = [ParamSpec(name, shape, torch.float32) for name, shape in SHAPES.items()]
LAYOUT = plan_layout(SPECS)
BOUNDARIES = cast("tuple[Boundary, ...]", ("element", "row", "tensor", Blocks(3), Blocks((2, 2))))


def _pieces(boundary: Boundary, world: int) -> list[tuple[Tensor, ParamShard]]:
    """Every piece of every rank, with that rank's shard of a buffer that counts its elements."""
    plan = plan_shard(LAYOUT, world_size=world, boundary=boundary)
    buffer = torch.arange(float(max(plan.numel, plan.ranges[-1][1])))
    shards = [buffer[start:stop] for start, stop in plan.ranges]
    return [(shard, p) for rank, shard in enumerate(shards) for p in make_param_shards(plan, rank)]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_pieces_are_the_parameters(boundary: Boundary, world: int) -> None:
    """Those of all ranks, one after the other, have each element once."""
    found: dict[str, list[float]] = {name: [] for name in SHAPES}
    for shard, piece in _pieces(boundary, world):
        assert piece.view(shard).numel() == piece.numel == piece.flat(shard).numel()
        assert torch.equal(piece.view(shard).flatten(), piece.flat(shard))
        found[piece.spec.name] += piece.flat(shard).tolist()
    for spec, offset in zip(LAYOUT.specs, LAYOUT.offsets, strict=True):
        assert found[spec.name] == [offset + element for element in range(spec.numel)]


@pytest.mark.parametrize("boundary", ["element", Blocks(3)])
def test_pieces_of_elements_are_columns(boundary: Boundary) -> None:
    """`(elements, 1)`, so that they have as many dimensions as the parameter."""
    for shard, piece in _pieces(boundary, 2):
        whole, view = SHAPES[piece.spec.name], piece.view(shard)
        assert view.is_contiguous()
        assert view.dim() == len(whole) or (not whole and not piece.numel)
        if piece.numel < piece.spec.numel:
            assert tuple(view.shape[1:]) == (1,) * (len(whole) - 1)


def test_pieces_of_rows_inside_matrices_keep_the_rows() -> None:
    """The dimensions before them are one; those between have one element."""
    specs = [ParamSpec("batch", (2, 6, 4), torch.float32)]
    plan = plan_shard(plan_layout(specs), world_size=2, boundary=Blocks((2, 1)))
    shapes = [make_param_shards(plan, rank)[0].shape for rank in range(2)]
    assert shapes == [(6, 1, 4), (6, 1, 4)]


@pytest.mark.parametrize(("boundary", "world"), [("row", 3), ("tensor", 3), ("element", 1)])
def test_pieces_of_whole_rows_keep_their_dimensions(boundary: Boundary, world: int) -> None:
    """Only the first gets shorter; a number that another rank has is an empty vector."""
    for shard, piece in _pieces(boundary, world):
        shape = SHAPES[piece.spec.name]
        found = tuple(piece.view(shard).shape)
        if shape == () and not piece.numel:
            assert found == (0,)
            assert piece.view(shard).is_contiguous()
        else:
            assert len(found) == len(shape)
            assert found[1:] == shape[1:]
