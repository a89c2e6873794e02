"""Where ranks may cut a parameter, and that it matters to nothing else."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    mine,
    plain,
    sharded,
    train,
    whole_state,
)

BLOCK, TILE = 4, (2, 3)


def _trained(part: Any, rank: int, world_size: int, boundary: Any) -> list[Any]:
    """Elements of each parameter that this rank has, and how far two steps are from one process."""
    reference, model = plain(), sharded(part, boundary=boundary)
    pieces = {name: param.numel() for name, param in model.named_parameters()}
    train(reference, [batch(world_size, step) for step in range(2)])
    train(model, [mine(batch(world_size, step), rank) for step in range(2)])
    return [pieces, distance(part.full_state_dict(model)["model"], whole_state(reference))]


def _in_blocks(part: Any, rank: int, world_size: int) -> list[Any]:
    return _trained(part, rank, world_size, part.Blocks(BLOCK))


@requirement(
    "FP-208",
    level="MUST",
    text=(
        "With `boundary=Blocks(n)` every rank's piece of a parameter MUST begin and end between"
        " blocks of n elements or at the parameter's end, and training MUST be that of one "
        "process."
    ),
    rationale="a quantised block that two ranks share has two scales",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_blocks_stay_whole(part, ranks):
    """Every rank's piece begins at a block, in three ranks that cannot have as many each."""
    found = ranks(3, _in_blocks)
    for name, param in plain().named_parameters():
        ends = list(accumulate(pieces[name] for pieces, _ in found))
        assert ends[-1] == param.numel()
        assert all(end % BLOCK == 0 or end == param.numel() for end in ends), name
    assert sum(pieces["inner.0.0.weight"] > 0 for pieces, _ in found) > 1
    assert max(error for _, error in found) < 1e-5


def _in_tiles(part: Any, rank: int, world_size: int) -> list[Any]:
    return _trained(part, rank, world_size, part.Blocks(TILE))


@requirement(
    "FP-241",
    level="MUST",
    text=(
        "With `boundary=Blocks((rows, columns))` every rank's piece of a matrix MUST begin and "
        "end after a multiple of `rows` rows or at the matrix's end, and training MUST be that "
        "of one process."
    ),
    rationale=(
        "quantisers such as DeepSeek's fp8 have a scale for each tile of 128 x 128, of which no"
        " rank can compute the half"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_rows_of_tiles_stay_whole(part, ranks):
    """Pieces of a matrix end after pairs of rows, or after the last one, which is alone."""
    found = ranks(3, _in_tiles)
    for name, param in plain().named_parameters():
        ends = list(accumulate(pieces[name] for pieces, _ in found))
        assert ends[-1] == param.numel()
        if param.dim() == 2:
            together = TILE[0] * param.shape[1]
            assert all(end % together == 0 or end == param.numel() for end in ends), name
    assert sum(pieces["inner.0.0.weight"] > 0 for pieces, _ in found) > 1
    assert max(error for _, error in found) < 1e-5


def _scales_by_hand(weight: Tensor, tile: tuple[int, int]) -> Tensor:
    """Filled up to whole tiles: each one's largest element over float8's, for every element."""
    rows, columns = weight.shape
    whole = nn.functional.pad(weight, (0, -columns % tile[1], 0, -rows % tile[0]))
    tiles = whole.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
    scales = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    return scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:rows, :columns]


def _sent_in_tiles(part: Any, rank: int, world_size: int) -> bool:
    tile = (4, 3)
    sent = part.Scaled(torch.float8_e4m3fn, block=tile, scale_dtype=torch.float32)
    torch.manual_seed(0)
    layer = nn.Linear(8, 14)
    with torch.no_grad():
        layer.weight *= torch.logspace(-6, 6, 8)
    weight = layer.weight.detach().clone()
    model = part.fully_shard(layer, mixed_precision=part.MixedPrecision(gather=sent))
    model.unshard()
    found = model.weight.detach().clone()
    model.reshard()
    scales = _scales_by_hand(weight, tile)
    arrives = (weight / scales).to(torch.float8_e4m3fn).to(torch.float32) * scales
    kept = part.full_state_dict(model)["model"]["weight"]
    return torch.equal(found, arrives) and torch.equal(kept, weight)


@requirement(
    "FP-242",
    level="MUST",
    text=(
        "With `gather=Scaled(block=(rows, columns))` a matrix MUST be computed with as its "
        "tiles are rounded in one process, bit by bit and on any number of ranks; smaller tiles"
        " at its end have scales, too."
    ),
    rationale=(
        "weights that depend on the number of ranks change with the machine, and a scale for "
        "half of a tile is another one"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_tiles_have_a_scale_each(part, ranks):
    """On one, two and three ranks of a matrix with smaller tiles at both ends."""
    for world_size in (1, 2, 3):
        assert all(ranks(world_size, _sent_in_tiles)), world_size


def _with_codes(part: Any, rank: int, world_size: int, path: str, saves: bool) -> dict[str, Any]:
    """Of each parameter, codes of this rank's blocks: saved, or loaded with their dtype."""
    model = sharded(part, boundary=part.Blocks(BLOCK))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = {name: optimizer.state[p] for name, p in model.named_parameters() if p.numel()}
    if saves:
        torch.manual_seed(rank)
        for name, param in model.named_parameters():
            if param.numel():
                rows = -(-param.numel() // BLOCK)
                held[name]["codes"] = torch.randint(-128, 128, (rows, 3), dtype=torch.int8)
        part.save_sharded(model, path, optimizer=optimizer)
    else:
        part.load_sharded(model, path, optimizer=optimizer)
        held = {name: optimizer.state[p] for name, p in model.named_parameters() if p.numel()}
    assert all(values["codes"].dtype == torch.int8 for values in held.values())
    return {name: values["codes"].tolist() for name, values in held.items()}


@requirement(
    "FP-243",
    level="MUST",
    text=(
        "With `boundary=Blocks(n)` optimizer state with a row for each block of n elements that"
        " a rank has MUST come back from a sharded checkpoint into any number of ranks, each "
        "with the rows of its own blocks, bit by bit and in its own dtype."
    ),
    rationale=(
        "codes and scales of an 8-bit optimizer are all of its state, and a job that cannot go "
        "on with other machines loses it"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_state_of_blocks_comes_back_on_any_ranks(part, ranks, tmp_path):
    """Rows of two ranks, in order, on one and on three."""
    saved = ranks(2, _with_codes, str(tmp_path / "saved"), True)
    for world_size in (1, 3):
        found = ranks(world_size, _with_codes, str(tmp_path / "saved"), False)
        for name, _ in plain().named_parameters():
            told, expected = (
                [row for each in both for row in each.get(name, [])] for both in (found, saved)
            )
            assert told == expected, (name, world_size)


def _by_name(part: Any, rank: int, world_size: int) -> list[Any]:
    rules = part.by_name({"*weight": "tensor"}, missing_ok=True)
    return _trained(part, rank, world_size, rules)


def _by_class(part: Any, rank: int, world_size: int) -> list[Any]:
    rules = part.by_class({nn.Linear: "tensor"}, missing_ok=True)
    return _trained(part, rank, world_size, rules)


@requirement(
    "FP-209",
    level="MUST",
    text=(
        "With `boundary=by_name(...)` or `by_class(...)` each parameter MUST be cut as its own "
        "rule says, training MUST be that of one process, and a rule that fits no parameter "
        "MUST be an error that names it."
    ),
    rationale=(
        "matrices of an optimizer such as Muon have to be whole; what is left is shared out evenly"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
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
