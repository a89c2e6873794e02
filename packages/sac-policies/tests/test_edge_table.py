"""Replays through edges give torch's bits, and none is tried whose node forgot an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sac_policies.engines.recipe.tables._replay_table import RULES

from ._recipe import TABLE, W, bytes_held, is_plain, is_same, leaf, through_edges

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number added": lambda t: (t.cos() + 1.0).sin(),
    "constant added": lambda t: (t.cos() + TABLE).sin(),
    "filled": lambda t: (t.masked_fill(t.detach() > 0, 0.5) + t).sin(),
    "copied as it lay": lambda t: (t.cos().t().clone() * 2).sin(),
    "padded": lambda t: F.pad(t, (1, 1)).sin(),
}


@pytest.mark.parametrize("name", KEPT)
def test_value_whose_node_forgot_an_argument_is_kept(name: str) -> None:
    """The memory format no node knows, and for values so small nobody asks what was added."""
    x = leaf(6, 6)
    assert bytes_held(KEPT[name], x) >= 144
    assert is_plain(KEPT[name], x)


X, Y, ROW = leaf(3, 4), leaf(3, 4), leaf(4)

CASES: dict[str, Callable[[], torch.Tensor]] = {
    "sum of a row": lambda: X + ROW,
    "weighted sum": lambda: torch.add(X, Y, alpha=-2.5),
    "weighted difference": lambda: torch.sub(X, ROW, alpha=3),
    "three together": lambda: torch.cat([X, Y, X], 0),
    "together at the end": lambda: torch.cat([X, Y], -1),
    "stacked in the middle": lambda: torch.stack([X, Y], -2),
    "product added": lambda: torch.addcmul(X, Y, ROW, value=-0.7),
    "product with what is frozen, added": lambda: torch.addcmul(X, Y.detach(), ROW),
    "between": lambda: torch.lerp(X, ROW, 0.3),
    "chosen": lambda: torch.where(torch.eye(3, 4) > 0, X, ROW),
    "scaled": lambda: X * 0.7,
    "scaled in half": lambda: leaf(3, 4).bfloat16().detach().requires_grad_() * 0.7,
    "scaled by a number of 64 bits": lambda: X * torch.tensor(0.7, dtype=torch.float64),
    "scaled, without dimensions": lambda: leaf() * 0.7,
    "divided, without dimensions": lambda: leaf() / 3,
    "divided": lambda: X / 3,
    "divided by what is frozen": lambda: X / ROW.detach(),
    "divided, frozen": lambda: X.detach() / ROW,
    "cast": lambda: X.double(),
    "cast down": lambda: X.half(),
    "negative": lambda: -X,
    "repeated": lambda: X.repeat(2, 1, 3),
    "turned round twice": lambda: X.flip(0, -1),
    "rolled in each": lambda: X.roll((1, -2), (0, 1)),
    "rolled as one": lambda: X.roll(-5),
    "lower": lambda: X.tril(-1),
    "upper": lambda: X.triu(-2),
    "product, right frozen": lambda: X @ Y.detach().t(),
    "product, left frozen": lambda: X.detach().t() @ Y,
    "batch of products, frozen": lambda: torch.bmm(X[None].detach(), leaf(1, 4, 2)),
    "number less": lambda: 2.5 - X,
    "constant less": lambda: torch.rsub(X, Y.detach(), alpha=-2),
    "number more": lambda: 1 + X,
    "more of a constant": lambda: torch.add(Y.detach(), X, alpha=3),
    "chosen, a number": lambda: torch.where(X.detach() > 0, X, -0.5),
    "chosen, a constant": lambda: torch.where(X.detach() > 0, ROW.detach(), X),
    "filled with a number": lambda: X.masked_fill(X.detach() > 0, -math.inf),
    "filled with a value": lambda: X.masked_fill(X.detach() > 0, torch.tensor(0.5)),
    "together with a constant": lambda: torch.cat([Y.detach(), X], 1),
    "stacked on a constant": lambda: torch.stack([X, Y.detach()], 1),
    "padded": lambda: F.pad(X, (1, 2, 0, 1)),
    "padded by a number": lambda: F.pad(X, (-1, 2), "constant", 0.3),
    "frozen bias": lambda: F.linear(X, leaf(2, 4), leaf(2).detach()),
    "frozen bias of a batch": lambda: torch.baddbmm(
        leaf(2, 1, 5).detach(), leaf(2, 3, 4), leaf(2, 4, 5), beta=-0.5
    ),
    "weighted product": lambda: torch.addmm(leaf(3), X, leaf(4, 3).detach(), beta=0.5, alpha=-2),
}

GROUPS = torch.tensor([3, 8], dtype=torch.int32)


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="this torch has none")
@pytest.mark.parametrize("frozen", [(), (0,), (1,)], ids=["neither", "left", "right"])
def test_products_of_groups_run_again_on_their_own_operands(frozen: tuple[int, ...]) -> None:
    """Rows and weights, each from its edge, or as autograd saved it for the other's gradient."""
    rows, weights = leaf(8, 16), leaf(2, 16, 32)
    given = [t.detach() if at in frozen else t for at, t in enumerate((rows, weights))]
    made = torch.ops.aten._grouped_mm(*given, GROUPS)
    found = through_edges(lambda: torch.ops.aten._grouped_mm(*given, GROUPS))
    assert is_same(found, made.detach())


@pytest.mark.parametrize("name", CASES)
def test_operator_runs_again_on_what_its_edges_lead_to(name: str) -> None:
    """With the arguments that its node knows, negative ones among them."""
    made = CASES[name]()
    assert is_same(through_edges(CASES[name]), made.detach())


def test_copy_is_made_row_major() -> None:
    """Whatever its operand is; another format no node knows."""
    found = RULES["CloneBackward0"].through(X.clone().grad_fn, Y.t())
    assert is_same(found, Y.t().contiguous())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_copy_to_another_device_is_not_made_again(device: str) -> None:
    """Its node knows where the gradient goes, and no argument of the copy."""
    made = X.to(device, torch.float64)
    assert (RULES["ToCopyBackward0"].unfit(made.grad_fn) == "") is (device == "cpu")


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.bfloat16().add_(t).sin(),
        lambda t: t.bfloat16().sub_(t).cos(),
        lambda t: (t.bfloat16().cos() * t).sin(),
        lambda t: t.bfloat16().mul_(W.detach()).sin(),
        lambda t: t.half().mul_(W[0].detach()).sin(),
        lambda t: t.bfloat16().mul_(W[0, 0].detach()).sin(),
    ],
    ids=["add", "sub", "mul", "mul in place", "by a row", "by a value"],
)
def test_operands_of_two_dtypes_give_what_they_gave(function: Callable[..., Any]) -> None:
    """In place the first one's is kept; nothing is held, and no bit is another."""
    x = leaf(6, 6)
    assert bytes_held(function, x) == 0
    assert is_plain(function, x)


def test_product_of_a_value_and_a_number_gives_what_it_gave() -> None:
    """The number has no dtype of its own; torch 2.9 keeps the value's copy."""
    assert is_plain(lambda t: (t[0, 3].bfloat16() * 0.7).sin(), leaf(6, 6))
