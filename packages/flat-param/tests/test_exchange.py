"""Exchanges that gather and sum, between ranks that are played here in turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flat_param.comm._exchange import Arguments, to_gather_halves, to_sum


def _carry(ranks: Sequence[Arguments]) -> int:
    """What `all_to_all_single` does; elements that ranks have copied to themselves."""
    size, to_self = len(ranks), 0
    sent = [_pieces(given, sizes, size) for _, given, _, sizes in ranks]
    for rank, (out, _, sizes, _) in enumerate(ranks):
        for other, place in enumerate(_pieces(out, sizes, size)):
            place.copy_(sent[other][rank])
            to_self += place.numel() * (other == rank)
    return to_self


def _pieces(tensor: Tensor, sizes: list[int] | None, ranks: int) -> Sequence[Tensor]:
    return tensor.split(sizes if sizes else tensor.numel() // ranks)


@pytest.mark.parametrize("numel", [0, 1, 5])
def test_two_ranks_gather_in_place(numel: int) -> None:
    """Both have both parts, of which gloo has moved half and copied nothing."""
    shards = [torch.randn(numel), torch.randn(numel)]
    fulls = [torch.full((2 * numel,), torch.nan) for _ in shards]
    ranks = [to_gather_halves(fulls[rank], shards[rank], rank=rank) for rank in (0, 1)]
    for (out, given, _, _), full in zip(ranks, fulls, strict=True):
        assert out.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert out.numel() == given.numel() == numel
    assert _carry(ranks) == 0
    assert all(torch.equal(full, torch.cat(shards)) for full in fulls)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_in_the_order_of_ranks(world: int, dtype: torch.dtype) -> None:
    """Bit by bit, on all ranks; two of them send nothing to themselves."""
    numel = 7
    fulls = [torch.randn(world * numel).to(dtype) for _ in range(world)]
    outs = [torch.full((numel,), torch.nan, dtype=dtype) for _ in range(world)]
    pairs = [to_sum(outs[rank], fulls[rank], rank=rank, world_size=world) for rank in range(world)]
    to_self = _carry([exchanged for exchanged, _ in pairs])
    assert to_self == (0 if world == 2 else world * numel)
    for _, add_up in pairs:
        add_up()
    expected = fulls[0].clone()
    for full in fulls[1:]:
        expected += full
    assert torch.equal(torch.cat(outs), expected)


def test_two_ranks_receive_half_of_what_they_add() -> None:
    """It is the other's part alone, so the buffer for it is half as large."""
    out, full = torch.empty(6), torch.randn(12)
    (received, given, _, _), add_up = to_sum(out, full, rank=0, world_size=2)
    assert received.numel() == given.numel() == 6
    add_up()
