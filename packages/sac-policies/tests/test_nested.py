"""Nested tensors of both layouts, created in a region or passed to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import checkpoint, fit_, profile, recompute_all, report, save_ops
from sac_policies.policies import OpView
from sac_policies.policies._operators import facts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning"),
]
LAYOUTS = [torch.strided, torch.jagged]
POLICIES = [recompute_all(), save_ops("aten.linear")]
OFFSETS = torch.tensor([0, 3, 7, 12])
torch.manual_seed(0)
WEIGHT = torch.randn(16, 16, requires_grad=True)


def parts(x: Tensor) -> list[Tensor]:
    """Three sequences of different lengths."""
    return [x[:3], x[3:7], x[7:]]


def dense(rows: Tensor) -> Tensor:
    """All rows of a nested tensor's parts."""
    return rows.values() if rows.layout is torch.jagged else torch.cat(list(rows.unbind()))


def body(rows: Tensor) -> Tensor:
    """The operators of the region on sequences."""
    return dense(F.gelu(F.linear(rows, WEIGHT))).sin().cos()


def making(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    """A region that creates the sequences."""
    return lambda x: body(torch.nested.as_nested_tensor(parts(x), layout=layout))


def from_offsets(x: Tensor) -> Tensor:
    """A region that creates sequences from existing offsets."""
    return body(torch.nested.nested_tensor_from_jagged(x, OFFSETS))


def values() -> Tensor:
    """Inputs of regions that create sequences."""
    return torch.linspace(-2, 2, 192).sin().view(12, 16).requires_grad_()


def given(layout: torch.layout) -> Tensor:
    """Sequences that are inputs of a region."""
    rows = parts(values().detach())
    return torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)


class NoOp(torch.autograd.Function):
    """A no-op autograd function, like the one that torch's checkpoint applies to its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a new tensor."""
        return torch.ones(())


def functions_take_strided() -> bool:
    """Whether autograd functions accept strided nested tensors; not on torch 2.9."""
    try:
        NoOp.apply(given(torch.strided))
    except RuntimeError:
        return False
    return True


def gradients(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Gradients of the inputs and the weight."""
    first, second = torch.autograd.grad(function(x).sum(), [x, WEIGHT])
    return [dense(first) if first.is_nested else first, second]


def is_plain(function: Any, make: Callable[[], Tensor], **options: Any) -> bool:
    """Whether four forwards match the gradients without checkpointing."""
    expected = gradients(function, make())
    return all(
        torch.equal(one, other)
        for _ in range(4)
        for one, other in zip(
            gradients(lambda x: checkpoint(function, x, **options), make()), expected, strict=True
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_plain(layout: torch.layout, policy: Any) -> None:
    """Nested tensors created inside or passed in."""
    assert is_plain(making(layout), values, policy=policy)
    assert is_plain(body, lambda: given(layout), policy=policy)


def test_attention_of_strided_ones_has_no_mask() -> None:
    """Their parts have no common length, which a mask would need."""

    def attend(x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor(parts(x)).view(3, -1, 2, 8).transpose(1, 2)
        rows = F.scaled_dot_product_attention(*[rows.contiguous()] * 3).transpose(1, 2)
        return F.linear(dense(rows.contiguous().view(3, -1, 16)), WEIGHT).tanh()

    assert is_plain(attend, values, policy=recompute_all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_report_tells_of_them(layout: torch.layout, policy: Any) -> None:
    """Created inside or passed in; readers are only looked up for values that are recomputed."""
    there = [(making(layout), values())]
    if layout is torch.jagged or functions_take_strided():
        there.append((body, given(layout)))
    for function, x in there:
        told = report(function, x, policy=policy)
        assert "aten.gelu.default" in [row.op for row in told.rows]
        assert not any("_nested_tensor_size" in row.op for row in told.rows)
        assert str(told)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_profile_tells_of_them(layout: torch.layout) -> None:
    """Jagged tensors contain tensors without data, which need no device synchronization."""
    assert profile(making(layout), values(), repeats=1).ops


@pytest.mark.parametrize("layout", LAYOUTS)
def test_policies_see_their_bytes(layout: torch.layout) -> None:
    """Each part counts with its own size."""
    seen = OpView(torch.ops.aten.relu.default, 0, given(layout))
    assert seen.out_bytes == 12 * 16 * 4


def test_blocks_of_fit_may_make_strided_ones() -> None:
    """They are recomputed, with the gradients of no checkpointing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            rows = F.gelu(self.linear(torch.nested.as_nested_tensor(parts(x))))
            return dense(F.relu(rows)).sin()

    model = nn.Sequential(Block(), Block(), Block())
    expected = torch.autograd.grad(model(values()).sum(), list(model.parameters()))
    assert fit_(model, values(), 0.9)
    found = torch.autograd.grad(model(values()).sum(), list(model.parameters()))
    assert all(map(torch.equal, found, expected))


def test_what_tells_of_geometry_is_not_looked_at() -> None:
    """Size operators run under autograd's lock: reading a jagged leaf's node would deadlock."""
    asked = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with Asked():
        body(given(torch.jagged))
    size = torch.ops.aten.sym_size.default
    assert size in asked
    assert facts_of(size).bookkeeping
