"""Dtypes that a unit computes, sums and keeps; one check per claim."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _harness import (
    batches,
    distance,
    loss_of,
    main,
    plain,
    raises,
    run_checks,
    sharded,
    share,
    whole_state,
)
from _whole import plain_grads, whole_grads
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import MixedPrecision as OfFsdp1

import flat_param
from flat_param import MixedPrecision, fully_shard


def check_mixed_precision_computes_low_and_keeps_high(rank: int, world: int) -> None:
    """Mixed precision computes low and keeps high."""
    seen: list[torch.dtype] = []
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = sharded(mixed_precision=precision), plain()
    model.blocks[0].up.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert seen == [torch.bfloat16]
    assert model.blocks[0].up.weight.dtype == torch.float32
    assert model.blocks[0].up.weight.grad.dtype == torch.float32
    assert distance(whole_grads(model), plain_grads(reference)) < 0.05


def check_reduce_dtype_and_inputs_are_as_asked(rank: int, world: int) -> None:
    """Each setting alone: sums in another dtype, and inputs left as they come."""
    (ids,) = batches(world, 1)
    for dtype, error in ((torch.float64, 1e-6), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        model, reference = sharded(mixed_precision=MixedPrecision(reduce_dtype=dtype)), plain()
        loss_of(model, share(ids, rank)).backward()
        loss_of(reference, ids).backward()
        assert {grads.dtype for grads in model._flat_param.grads} == {dtype}
        assert model.head.weight.grad.dtype == torch.float32
        assert distance(whole_grads(model), plain_grads(reference)) < error, dtype
    for cast in (True, False):
        seen: list[torch.dtype] = []
        layer = nn.Linear(3, 2)
        fully_shard(layer, mixed_precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=cast))
        layer.forward = lambda x, seen=seen: seen.append(x.dtype)
        layer(torch.ones(2, 3))
        assert seen == [torch.bfloat16 if cast else torch.float32]


def check_low_precision_grads_are_kept_on_request(rank: int, world: int) -> None:
    """Low precision grads are kept on request."""
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = sharded(mixed_precision=precision)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    assert model.head.weight.grad.dtype == torch.bfloat16


def check_dtype_change_is_followed(rank: int, world: int) -> None:
    """Dtype change is followed."""
    model, reference = sharded(), plain()
    model.to(torch.float64)
    reference.to(torch.float64)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert model.head.weight.dtype == torch.float64
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-12


def check_odd_parameters_survive(rank: int, world: int) -> None:
    """Odd parameters survive."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.wave = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
            self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
            self.column = nn.Parameter(torch.arange(12.0).view(4, 3)[:, :2])
            self.index = nn.Parameter(torch.tensor([1, 0]), requires_grad=False)
            self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            wave = torch.view_as_real(self.wave * self.wave)[self.index].sum()
            columns = (self.turned[:, :2] * self.column).sum()
            return x * self.scalar * (wave + columns + self.low.float().sum()) + self.empty.sum()

    reference, model = Odd(), Odd()
    expected = {k: v.clone() for k, v in whole_state(reference).items()}
    fully_shard(model)
    state = whole_state(model)
    assert all(torch.equal(state[k], v) for k, v in expected.items())
    x = torch.ones(2)
    model(x).sum().backward()
    reference(x).sum().backward()
    state = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for param in model.parameters():
        if param.grad is not None and param.grad.dtype != torch.int64:
            param.data.copy_(param.grad)
    got = whole_state(model)
    assert all(torch.allclose(got[k], v) for k, v in state.items())


def run(rank: int, world: int) -> dict[str, str]:
    """All checks."""
    return run_checks(globals(), rank, world)


class Table(nn.Module):
    """Buffers that a state dict has and one that it has not, a count, and a layer inside."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("angles", torch.randn(4), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.inner = inner or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.to(self.weight.dtype) @ self.weight + self.shift) * self.angles
        return y * self.count


def _table() -> Table:
    return Table(Table())


def check_buffers_are_cast_as_fsdp1s(rank: int, world: int) -> None:
    """Of a unit and of the one inside it, each by its own; outputs and state dicts are FSDP1's."""
    if world == 1:
        return  # FSDP1 divides nothing there, and warns
    low, half = torch.bfloat16, torch.float16
    for inner, outer in ((low, low), (None, low), (half, low), (low, None)):
        theirs = FullyShardedDataParallel(
            Table(_by_fsdp1(Table(), inner)), **_options_of_fsdp1(outer)
        )
        ours = _table()
        for module, dtype in ((ours.inner, inner), (ours, outer)):
            precision = MixedPrecision(param_dtype=low, buffer_dtype=dtype)
            fully_shard(module, mixed_precision=precision)
        assert ours.shift.dtype == ours.angles.dtype == (outer or torch.float32)
        assert ours.inner.shift.dtype == (inner or torch.float32)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        assert torch.equal(ours(x), theirs(x))
        kind = StateDictType.FULL_STATE_DICT
        with (
            pytest.warns(FutureWarning),
            FullyShardedDataParallel.state_dict_type(theirs, kind, FullStateDictConfig()),
        ):
            expected = whole_state(theirs)
        found = whole_state(ours)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype, name


def _by_fsdp1(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    return FullyShardedDataParallel(module, **_options_of_fsdp1(dtype))


def _options_of_fsdp1(dtype: torch.dtype | None) -> dict[str, Any]:
    precision = OfFsdp1(param_dtype=torch.bfloat16, buffer_dtype=dtype)
    return {
        "mixed_precision": precision,
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    }


def check_cast_buffers_are_saved_and_loaded(rank: int, world: int) -> None:
    """In their own dtype; what is loaded is cast, and is there after a load that fails."""
    precision = MixedPrecision(buffer_dtype=torch.bfloat16)
    first = fully_shard(_table(), mixed_precision=precision)
    with torch.no_grad():
        first.shift.fill_(1.5)
        first.inner.angles.fill_(2.5)
    state = whole_state(first)
    assert state["shift"].dtype == torch.float32
    assert "inner.angles" not in state
    second = fully_shard(_table(), mixed_precision=precision)
    second.load_state_dict(state)
    assert second.shift.dtype == torch.bfloat16
    assert torch.equal(second.shift, first.shift)
    box = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(box)
    flat_param.save_sharded(first, box[0])
    plain_table = fully_shard(_table())
    third = fully_shard(_table(), mixed_precision=precision)
    for module in (plain_table, third):
        flat_param.load_sharded(module, box[0])
        assert torch.equal(module.shift, torch.full((4,), 1.5).to(module.shift.dtype))
    assert third.shift.dtype == torch.bfloat16
    with torch.no_grad():
        third.shift.fill_(4)
    wrong = {**state, "weight": torch.ones(3)}
    raises(flat_param.StateError, "'weight'", lambda: flat_param.load_full_state_dict(third, wrong))
    assert torch.equal(third.shift.float(), torch.full((4,), 4.0))
    third.to(torch.float64)
    assert whole_state(third)["shift"].dtype == torch.float64


if __name__ == "__main__":
    main(run)
