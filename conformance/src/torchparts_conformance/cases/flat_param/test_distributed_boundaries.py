"""Where ranks may cut a parameter, and that it matters to nothing else."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    mine,
    plain,
    sharded,
    train,
)

BLOCK = 4


def _trained(part: Any, rank: int, world_size: int, boundary: Any) -> list[Any]:
    """Elements of each parameter that this rank has, and how far two steps are from one process."""
    reference, model = plain(), sharded(part, boundary=boundary)
    pieces = {name: param.numel() for name, param in model.named_parameters()}
    train(reference, [batch(world_size, step) for step in range(2)])
    train(model, [mine(batch(world_size, step), rank) for step in range(2)])
    return [pieces, distance(part.full_state_dict(model)["model"], reference.state_dict())]


def _in_blocks(part: Any, rank: int, world_size: int) -> list[Any]:
    return _trained(part, rank, world_size, part.Blocks(BLOCK))


@requirement("FP-208")
def test_blocks_stay_whole(part, ranks):
    """Every rank's piece begins at a block, in three ranks that cannot have as many each."""
    found = ranks(3, _in_blocks)
    for name, param in plain().named_parameters():
        ends = list(accumulate(pieces[name] for pieces, _ in found))
        assert ends[-1] == param.numel()
        assert all(end % BLOCK == 0 or end == param.numel() for end in ends), name
    assert sum(pieces["inner.0.0.weight"] > 0 for pieces, _ in found) > 1
    assert max(error for _, error in found) < 1e-5


def _by_name(part: Any, rank: int, world_size: int) -> list[Any]:
    rules = part.by_name({"*weight": "tensor"}, missing_ok=True)
    return _trained(part, rank, world_size, rules)


def _by_class(part: Any, rank: int, world_size: int) -> list[Any]:
    rules = part.by_class({nn.Linear: "tensor"}, missing_ok=True)
    return _trained(part, rank, world_size, rules)


@requirement("FP-209")
def test_each_parameter_has_its_own_boundary(part, ranks):
    """Weights are whole on one rank by their name, all of a layer by its class; nothing else is."""
    found, of_layers = ranks(3, _by_name), ranks(3, _by_class)
    cut = set()
    for name, param in plain().named_parameters():
        sizes = [pieces[name] for pieces, _ in found]
        assert sum(sizes) == param.numel()
        if name.endswith("weight"):
            assert max(sizes) == param.numel(), name
        elif 0 < max(sizes) < param.numel():
            cut.add(name)
        assert max(pieces[name] for pieces, _ in of_layers) == param.numel()
    assert cut
    assert max(error for _, error in (*found, *of_layers)) < 1e-5


def _refused(part: Any, rank: int, world_size: int) -> list[str]:
    said = []
    for rules in (part.by_name({"weigth": "tensor"}), part.by_class({nn.Embedding: "row"})):
        torch.manual_seed(0)
        try:
            part.fully_shard(nn.Linear(3, 2), boundary=rules)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


@requirement("FP-209")
def test_a_rule_that_fits_nothing_is_named(part, ranks):
    """By what was written, on each rank."""
    for name, kind in ranks(2, _refused):
        assert "weigth" in name
        assert "Embedding" in kind
