"""One segment's shard and whole buffer, as some ranks in one process have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flat_param import Blocks
from flat_param.layout._options import Precision
from flat_param.sharded._piece_tensors import plain
from flat_param.sharded._sharded_params import ShardedParams, as_bytes, placement_of

Make = Callable[..., list[ShardedParams]]
BOUNDARIES = ("element", "row", "tensor", Blocks(3), Blocks((2, 2)))
LOW = Precision(param_dtype=torch.bfloat16)


def _gather(parts: list[ShardedParams]) -> None:
    for pending in [part.start_gather() for part in parts]:
        if pending is not None:
            pending.wait()


def _bytes(part: ShardedParams) -> int:
    return int(part.full.untyped_storage().nbytes())


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_has_all_values_after_a_gather(
    parts_of_ranks: Make, world: int, boundary: str
) -> None:
    """However they are cut: odd sizes, a scalar, an empty tensor, ranks without a piece."""
    tensors = (torch.randn(5, 3), torch.randn(()), torch.randn(0, 4), torch.randn(7))
    parts = parts_of_ranks(world, *tensors, boundary=boundary)
    _gather(parts)
    for part in parts:
        for leaf, tensor in zip(part.leaves, tensors, strict=True):
            assert leaf.shape == tensor.shape
            assert torch.equal(leaf, tensor)


DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_is_gathered_and_only_floating_point_is_cast(
    parts_of_ranks: Make, dtype: torch.dtype
) -> None:
    """What mixed precision makes of it, and strides that are not those of rows."""
    tensors = ((10 * torch.randn(4, 3)).to(dtype).t(), torch.randn(5).to(dtype))
    parts = parts_of_ranks(3, *tensors, trainable=False, precision=LOW)
    _gather(parts)
    computed = torch.bfloat16 if dtype.is_floating_point else dtype
    for part in parts:
        assert part.shard.dtype == dtype
        for leaf, tensor in zip(part.leaves, tensors, strict=True):
            assert leaf.stride() == tensor.stride()
            assert torch.equal(leaf, tensor.to(computed))


def test_whole_buffer_has_memory_only_while_in_use(parts_of_ranks: Make) -> None:
    """The leaves stay the same objects; filling again is no change of what autograd has saved."""
    parts = parts_of_ranks(2, torch.randn(5, 3))
    leaves = [part.leaves for part in parts]
    versions = [leaf._version for part in parts for leaf in part.leaves]
    for _ in range(2):
        assert [_bytes(part) for part in parts] == [0, 0]
        _gather(parts)
        assert [_bytes(part) for part in parts] == [part.plan.numel * 4 for part in parts]
        for part in parts:
            part.free()
    assert all(part.leaves is before for part, before in zip(parts, leaves, strict=True))
    assert [leaf._version for part in parts for leaf in part.leaves] == versions


def test_parameters_keep_their_identity_and_view_the_shard(
    parts_of_ranks: Make, own_all: Callable[..., bool]
) -> None:
    """Whatever is beyond the pieces is zero."""
    for part in parts_of_ranks(2, torch.randn(3, 3) + 10, torch.randn(3) + 10):
        assert all(isinstance(param, nn.Parameter) and param.is_leaf for param in part.params)
        filled = [param for param in part.params if param.numel()]
        assert own_all(filled, part.shard)
        total = torch.stack([plain(param).sum() for param in filled]).sum()
        assert torch.isclose(part.shard.sum(), total)


@pytest.mark.parametrize(
    ("options", "aliased"), [({}, True), ({"precision": LOW}, False)], ids=["own", "low"]
)
def test_whole_is_the_shard_where_one_rank_holds_all_of_it(
    parts_of_ranks: Make, options: dict[str, Any], aliased: bool
) -> None:
    """Then nothing is gathered, freed or remade."""
    (part,) = parts_of_ranks(1, torch.randn(5, 3), **options)
    assert part.aliased == aliased
    assert (part.full is part.shard) == aliased
    pending = part.start_gather()
    assert (pending is None) == aliased
    if pending is not None:
        pending.wait()
    before = part.leaves
    (leaf,) = part.leaves
    assert (leaf.data_ptr() == part.params[0].data_ptr()) == aliased
    part.free()
    part.remake()
    assert (part.leaves is before) == aliased
    assert _bytes(part) == (part.shard.nbytes if aliased else 0)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("world", [1, 3])
def test_only_ranks_without_the_rows_leave_a_parameter_out(
    parts_of_ranks: Make, world: int, boundary: str
) -> None:
    """Where pieces keep their dimensions; an empty 1-D piece does nobody harm."""
    parts = parts_of_ranks(
        world, torch.randn(2, 8), torch.randn(4), torch.randn(0), boundary=boundary
    )
    for part in parts:
        for index, piece in enumerate(part.pieces):
            expected = boundary != "element" and world > 1 and piece.numel == 0
            assert part.leaves_out(index) == expected
    out = [part.leaves_out(index) for part in parts for index in (0, 1)]
    assert any(out) == (boundary != "element" and world > 1)


def test_offloaded_shards_lie_on_the_cpu(parts_of_ranks: Make) -> None:
    """Before and after a change of dtype; what computes is elsewhere, and no shard of one rank."""
    (part,) = parts_of_ranks(1, torch.randn(3), device="meta", cpu_offload=True)
    for dtype in (torch.float32, torch.float64):
        assert part.shard.device.type == part.params[0].device.type == "cpu"
        assert part.full.device.type == part.device.type == "meta"
        assert part.full.dtype == part.shard.dtype == dtype
        assert not part.aliased
        part.rebind([param.detach().double() for param in part.params])


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_are_marked_with_their_ranks(
    parts_of_ranks: Make, world: int, boundary: str
) -> None:
    """The mark by which torch's functions are kept from being wrong; after a move, too."""
    (part, *_) = parts_of_ranks(world, torch.randn(4, 3), torch.randn(2), boundary=boundary)
    for _ in range(2):
        marks = [param._flat_param_mark for param in part.params]
        assert marks == [("p0", world), ("p1", world)]
        for param in part.params:
            del param._flat_param_mark
        part.rebind([param.detach().double() for param in part.params])


def test_buffer_made_anew_leaves_the_old_one_to_its_users(parts_of_ranks: Make) -> None:
    """A gather that was stopped may still write there."""
    parts = parts_of_ranks(2, torch.ones(4, 4))
    _gather(parts)
    old = [part.leaves[0] for part in parts]
    for part in parts:
        part.remake()
    assert all(torch.equal(leaf, torch.ones(4, 4)) for leaf in old)
    assert all(part.leaves[0] is not leaf for part, leaf in zip(parts, old, strict=True))
    _gather(parts)
    assert all(torch.equal(part.leaves[0], torch.ones(4, 4)) for part in parts)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_whole_value_is_loaded(parts_of_ranks: Make, boundary: str) -> None:
    """Of any dtype and stride; empty pieces take nothing."""
    parts = parts_of_ranks(3, torch.zeros(5, 3).t(), torch.zeros(2), boundary=boundary)
    whole = torch.randn(5, 3, dtype=torch.float64).t()
    for part in parts:
        versions = part.version
        part.load_full(0, whole)
        assert part.version == versions
        assert not part.params[1].any()
    _gather(parts)
    assert all(torch.equal(part.leaves[0], whole.float()) for part in parts)


def test_steps_change_the_version(parts_of_ranks: Make) -> None:
    """Of any parameter, once for each change in place."""
    (part,) = parts_of_ranks(1, torch.zeros(3), torch.zeros(2))
    before = part.version
    with torch.no_grad():
        for param in part.params:
            param.add_(1)
    assert part.version == before + 2


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_another_dtype_are_taken(
    parts_of_ranks: Make, world: int, dtype: torch.dtype
) -> None:
    """As `.to()` leaves them; leaves are new only where the dtype is, or they are the shard."""
    tensors = (torch.randn(4, 3), torch.randn(3))
    parts = parts_of_ranks(world, *tensors)
    before = [(part.leaves, part.params) for part in parts]
    for part in parts:
        part.rebind([param.detach().to(dtype, copy=True) for param in part.params])
    _gather(parts)
    for part, (leaves, params) in zip(parts, before, strict=True):
        assert part.shard.dtype == dtype
        assert all(now is then for now, then in zip(part.params, params, strict=True))
        assert part.held.moved() == []
        assert (part.leaves is leaves) == (dtype == torch.float32 and world > 1)
        assert part.aliased == (world == 1)
        for leaf, tensor in zip(part.leaves, tensors, strict=True):
            assert torch.equal(leaf, tensor.to(dtype))


def test_placement_is_in_words_that_all_ranks_share(parts_of_ranks: Make) -> None:
    """No index of a device; one entry for each segment."""
    (first,) = parts_of_ranks(1, torch.zeros(3))
    (second,) = parts_of_ranks(1, torch.zeros(3, dtype=torch.bfloat16))
    found = placement_of([first, second])
    assert found == "parameters are torch.float32 on cpu, torch.bfloat16 on cpu"


def test_trainable_segments_have_trainable_leaves(parts_of_ranks: Make) -> None:
    """And frozen ones frozen."""
    for trainable in (True, False):
        (part,) = parts_of_ranks(1, torch.zeros(3), trainable=trainable, precision=LOW)
        assert all(leaf.requires_grad == trainable for leaf in part.leaves)


def test_bytes_are_those_of_the_same_memory() -> None:
    """Of any dtype, also of no element."""
    numbers = torch.tensor([1.0, -0.0], dtype=torch.bfloat16)
    assert as_bytes(numbers).tolist() == [128, 63, 0, 128]
    assert as_bytes(numbers).data_ptr() == numbers.data_ptr()
    assert as_bytes(Tensor([])).shape == (0,)
