"""Dropout as accelerators have it: its mask is kept as bits, and what it returns is made again.

The CPU has that operator, too; there `F.dropout` does not call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sac_policies import profile, recompute_all, report, save_ops, solve
from sac_policies.engines.recipe.tables import _dropout_table
from sac_policies.engines.recipe.tables._replay_table import RULES

from ._recipe import bytes_held, run

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
RULE = RULES["NativeDropoutBackward0"]
NUMEL = 40 * 50
KIND = torch.accelerator.current_accelerator() or torch.device("cpu")


def node_of(p: float, dtype: torch.dtype = torch.float32) -> Any:
    """A node that dropped this share."""
    return aten.native_dropout(torch.ones(9, dtype=dtype, requires_grad=True), p, True)[0].grad_fn


def region(p: float, train: bool | None = True) -> Callable[[torch.Tensor], torch.Tensor]:
    """A region with a dropout that reads and is read."""

    def body(t: torch.Tensor) -> torch.Tensor:
        return aten.native_dropout(t.sin(), p, train)[0].cos()

    return body


def _run(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A dispatch mode that runs what it is given."""
    del self, types
    return func(*args, **(kwargs or {}))


def is_plain(body: Any, x: torch.Tensor) -> bool:
    """Whether four forwards give the gradient, and leave the random state, of no checkpointing."""
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    following = torch.rand(3, device=x.device)
    for _ in range(4):
        torch.manual_seed(0)
        (found,) = torch.autograd.grad(run(body, x).sum(), x)
        next_ones = torch.rand_like(following)
        if not (torch.equal(found, expected) and torch.equal(next_ones, following)):
            return False
    return True


@pytest.mark.parametrize("p", [0.1, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_the_bits_of_the_mask_are_held(p: float, dtype: torch.dtype) -> None:
    """Unless the kernel rounds another way in backward: then the value is, and why is said."""
    x = torch.randn(40, 50, dtype=dtype).requires_grad_()
    unfit = RULE.unfit(node_of(p, dtype))
    assert unfit in ("", f"may round otherwise in its backward where it drops {p}")
    assert not unfit or dtype is torch.bfloat16
    told = report(region(p), x, policy=recompute_all(), engine="recipe")
    assert told.held_bytes == NUMEL // 8 + (NUMEL * dtype.itemsize if unfit else 0)
    assert [each.why for each in told.saved if each.made_by == RULE.node] == [
        unfit and f"NativeDropoutBackward0 {unfit}"
    ]
    assert is_plain(region(p), x)


@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_what_drops_nothing_or_all_is_made_again(p: float, train: bool | None) -> None:
    """The node tells only by its backward whether anything was dropped."""
    x = torch.randn(40, 50).requires_grad_()
    assert bytes_held(region(p, train), x) <= NUMEL // 8
    assert is_plain(region(p, train), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.3, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_scale_that_only_the_forward_has_is_found(
    p: float, dtype: torch.dtype, autocast: bool
) -> None:
    """With `train=None` torch scales what it returns, and not the gradient."""
    x = torch.randn(40, 50, dtype=dtype).requires_grad_()
    weight = torch.randn(50, 50, dtype=dtype)

    def body(t: torch.Tensor) -> torch.Tensor:
        return region(p, None)(t @ weight)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert is_plain(body, x)


@pytest.mark.parametrize("train", [False, None])
def test_mask_that_may_drop_nothing_by_luck_does_not_tell(train: bool | None) -> None:
    """Without a zero in it both forwards have the same backward, so the value is kept."""
    x = torch.randn(8).requires_grad_()
    told = report(region(1e-4, train), x, policy=recompute_all(), engine="recipe")
    assert [each.why for each in told.saved if each.made_by == RULE.node] == [
        "NativeDropoutBackward0 does not tell whether its forward scaled"
    ]
    assert is_plain(region(1e-4, train), x)


def test_node_that_runs_another_kernel_is_taken_at_its_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of another torch: the trial shows whether that is right."""
    node = node_of(0.5)
    x = torch.ones(9)
    monkeypatch.setattr(_dropout_table._Asked, "__torch_dispatch__", _run)
    assert torch.equal(_dropout_table._again(node, x), node(x))


@pytest.mark.parametrize("view", [torch.t, lambda t: t[:, ::2], lambda t: t.expand(3, 40, 50)])
def test_operand_of_any_layout(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What is made again lies as the operand does."""
    x = torch.randn(40, 50).requires_grad_()
    assert is_plain(lambda t: region(0.3)(view(t)), x)


def test_another_format_in_backward_is_put_right() -> None:
    """A kernel may give a row-major gradient for an operand that is none."""
    x = torch.randn(40, 50).t()
    found = _dropout_table._again(torch.Tensor.contiguous, x)
    assert found.stride() == x.stride()
    assert torch.equal(found, x)


def test_share_is_tried_once_and_draws_nothing() -> None:
    """For each dtype and device."""
    node, before = node_of(0.37), torch.get_rng_state()
    _dropout_table._differs.clear()
    assert RULE.unfit(node) == RULE.unfit(node) == ""
    assert list(_dropout_table._differs) == [(0.37, torch.float32, torch.device("cpu"))]
    assert torch.equal(before, torch.get_rng_state())


def test_share_of_which_a_trial_shows_nothing_is_kept() -> None:
    """Next to nothing is left of what it is tried on."""
    assert RULE.unfit(node_of(0.9999)).startswith("may round otherwise")


def test_another_rounding_in_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one bit of the scale, also where the dtype would mostly hide it."""
    again = _dropout_table._again
    monkeypatch.setattr(_dropout_table, "_again", lambda n, x: again(n, x) * (1 + 2**-23))
    device = torch.device("cpu")
    assert not _dropout_table._is_repeated(0.5, torch.float32, device)
    assert not _dropout_table._is_repeated(0.5, torch.bfloat16, device)


def test_another_layout_in_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value must lie where views of it look for it."""
    again = _dropout_table._again
    monkeypatch.setattr(_dropout_table, "_again", lambda n, x: again(n, x).contiguous())
    assert not _dropout_table._is_repeated(0.5, torch.float32, torch.device("cpu"))


def test_share_is_not_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would end the capture; afterwards it is."""
    monkeypatch.setattr(_dropout_table, "is_capturing", lambda device: True)
    assert RULE.unfit(node_of(0.41)) == "was not tried before the graph that is captured"
    monkeypatch.undo()
    assert RULE.unfit(node_of(0.41)) == ""


def test_share_that_changes_is_noticed() -> None:
    """By forwards that follow those before them: in half precision the CPU rounds a tenth so."""
    share = [0.5]
    x = torch.randn(40, 50, dtype=torch.bfloat16).requires_grad_()

    def body(t: torch.Tensor) -> torch.Tensor:
        return region(share[0])(t)

    for share[0] in (*[0.5] * 4, 0.1, 0.5, 0.1):
        torch.manual_seed(0)
        (expected,) = torch.autograd.grad(body(x).sum(), x)
        torch.manual_seed(0)
        assert torch.equal(torch.autograd.grad(run(body, x).sum(), x)[0], expected)


def test_node_that_tells_nothing_is_none_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an older torch."""
    monkeypatch.setattr(_dropout_table, "output_facts", lambda node: None)
    assert RULE.unfit(node_of(0.5)) == "does not tell what it is of"


def test_policies_and_plans_decide_about_it() -> None:
    """It is kept where its operator is saved; a plan without bytes makes it again."""
    x = torch.randn(40, 50).requires_grad_()
    body = region(0.5)
    assert bytes_held(body, x, policy=save_ops("aten.native_dropout")) >= NUMEL * 4
    plan = solve(profile(body, x), 0)
    plan = plan or solve(profile(body, x), plan.smallest_bytes)
    assert plan.kept_bytes == report(body, x, policy=plan).held_bytes == NUMEL // 8


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dropout_of_a_device_holds_the_bits_of_its_mask(dtype: torch.dtype) -> None:
    """`F.dropout` runs this operator there."""
    x = torch.randn(40, 50, device=KIND, dtype=dtype).requires_grad_()

    def body(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(t.sin(), 0.5).cos()

    assert bytes_held(body, x) == NUMEL // 8
    assert is_plain(body, x)
