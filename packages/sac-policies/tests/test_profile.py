"""Profiling records the operators of a call, on tensors with and without data."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from sac_policies import BudgetError, profile
from sac_policies.budget import _profile

SIM: Any = getattr(torch, "simdev", None)
DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")


def leaf(*shape: int) -> torch.Tensor:
    """A leaf of ones."""
    return torch.ones(shape, requires_grad=True)


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A matmul, a view of it, and two functions of one value."""
    return F.silu((x @ w).view(-1)).exp()


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Dropout, then a copy."""
    return F.dropout(x.sin(), 0.5).clone() * 2


def test_operators_and_bytes_are_recorded() -> None:
    """Views have no own storage; calls are numbered by operator; inputs name their producers."""
    trace = profile(lambda x: (x @ x).t() @ x, leaf(3, 3))
    rows = [(op.name, op.call, op.out_bytes, op.inputs) for op in trace.ops]
    assert rows == [
        ("aten.mm.default", 0, 36, ()),
        ("aten.t.default", 0, 0, (0,)),
        ("aten.mm.default", 1, 36, (0,)),
    ]


def test_saved_tensors_are_recorded() -> None:
    """Each saved tensor names the operator that recomputes it and the call that allocated it."""
    trace = profile(function, leaf(2, 3), leaf(3, 5))
    packs = [(pack.producer, pack.made_by, pack.storage_bytes) for pack in trace.packs]
    assert packs[:2] == [("", -1, 0), ("", -1, 0)]
    assert packs[2:] == [("aten.view.default", 0, 40), ("aten.exp.default", 3, 40)]


@pytest.mark.parametrize("dry", [FakeTensorMode, partial(torch.device, "meta")])
def test_tensors_without_data_give_the_same_bytes(dry: Any) -> None:
    """A dry run allocates no memory and differs only in its unit."""
    real = profile(function, leaf(2, 3), leaf(3, 5), unit="flops")
    with dry():
        given = leaf(2, 3), leaf(3, 5)
        fake, timed = profile(function, *given), profile(function, *given, unit="ns")
    assert fake.unit == "flops"
    assert fake == real
    assert timed.packs == real.packs


@pytest.mark.timeout(60)
def test_fake_views_that_are_written_to_are_recorded() -> None:
    """Torch makes the node of a fake view by an operator, while holding the view's lock."""

    def joined(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(4, 12)
        out[:, :8].copy_(x * 2)
        out[:, 8:].copy_(x[:, :4].exp())
        return out.sin()

    with FakeTensorMode():
        fake = profile(joined, leaf(4, 8), unit="flops")
    real = profile(joined, leaf(4, 8), unit="flops")
    assert fake.total_bytes() == real.total_bytes()


def test_flops_count_products_and_elements() -> None:
    """A matmul counts its FLOPs, any other operator one per element."""
    trace = profile(function, leaf(2, 3), leaf(3, 5), unit="flops")
    assert [op.cost for op in trace.ops] == [60, 10, 10, 10]


def test_times_are_positive_and_the_shortest_counts() -> None:
    """Real tensors are timed in ns on every device."""
    trace = profile(function, leaf(64, 64), leaf(64, 64), repeats=3)
    assert trace.unit == "ns"
    assert all(op.cost > 0 for op in trace.ops)


@pytest.mark.accelerator
@pytest.mark.skipif(SIM is None, reason="needs the simulated device, whose time is known")
def test_operators_of_a_device_take_as_long_as_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without synchronization, the host queues all operators before the first one ends."""
    SIM.reset()
    x, w = leaf(2, 3).to("simdev"), leaf(3, 5).to("simdev")
    SIM.simulate(virtual=True, kernel_us=100)
    clock = SimpleNamespace(perf_counter_ns=lambda: round(SIM.host_us() * 1000))
    monkeypatch.setattr(_profile, "time", clock)
    trace = profile(function, x, w)
    SIM.reset()
    kernels = [op.cost for op in trace.ops if "view" not in op.name]
    assert kernels == [100_000] * 3


def test_how_masks_are_held_is_not_recorded() -> None:
    """The operators that pack a mask as bits would shift the plan's call numbers."""
    small, large = (torch.ones(n, requires_grad=True) for n in (8, 1 << 17))
    names = [[op.name for op in profile(dropped, x).ops] for x in (small, large)]
    with FakeTensorMode():
        fake = torch.ones(1 << 17, requires_grad=True)
        names.append([op.name for op in profile(dropped, fake).ops])
    assert names[0] == names[1] == names[2]


def test_random_operators_are_marked() -> None:
    """Attention without dropout draws no random numbers."""
    q = leaf(1, 1, 4, 4)
    trace = profile(
        lambda t: F.dropout(F.dropout(F.scaled_dot_product_attention(t, t, t))), q, unit="flops"
    )
    draws = [op.name for op in trace.ops if op.draws]
    assert len(draws) == 2
    assert all("bernoulli" in name for name in draws)


def test_overwritten_values_are_marked() -> None:
    """Overwritten values cannot be chosen."""
    trace = profile(lambda x: (x @ x).relu_(), leaf(3, 3))
    assert [op.overwritten for op in trace.ops] == [True, False]
    assert trace.items() == ()


def test_function_runs_once_for_each_repeat() -> None:
    """Profiling runs the function itself, with its side effects."""
    calls: list[int] = []
    profile(lambda x: calls.append(1) or x.sin(), leaf(2), repeats=3)
    assert len(calls) == 3


def test_changing_function_raises() -> None:
    """A plan needs the same operators in every repeat."""
    calls: list[int] = []

    def changing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin() if len(calls) == 1 else x.sin().cos()

    with pytest.raises(BudgetError, match="ran 1 and 2 operators that differ"):
        profile(changing, leaf(2), repeats=2)


def test_profiling_without_gradients_raises() -> None:
    """Nothing is saved under no_grad, so there is nothing to plan."""
    with torch.no_grad(), pytest.raises(BudgetError, match="gradients are off"):
        profile(torch.sin, leaf(2))


def test_sparse_operand_is_recorded() -> None:
    """It has no storage: its component tensors count, and reading them is not recorded."""
    matrix = torch.eye(64).to_sparse()

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(matrix, x.exp()).sin()

    trace = profile(mixed, leaf(64, 8))
    assert [op.name for op in trace.ops if "_indices" in op.name] == []
    assert [pack.made_by for pack in trace.packs].count(-1) == 1
