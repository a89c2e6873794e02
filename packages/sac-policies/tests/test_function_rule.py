"""An autograd function without a rule is run again where its arguments alone decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sac_policies import MutationError, profile, recompute_all, report, save_ops, solve
from sac_policies.engines.recipe.tables import _function_rule

from ._recipe import Readings, bytes_held, is_plain, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

Forward = Callable[..., Any]
OUTSIDE = torch.ones(6)
SIZE = 6 * 6 * 4


def a_function(forward: Forward) -> Callable[..., Tensor]:
    """Apply a function of this forward; its gradient is that of the sum of its arguments."""

    class Own(torch.autograd.Function):
        @staticmethod
        def backward(ctx: Any, grad: Tensor, *more: Any) -> Any:
            return tuple(grad if needed else None for needed in ctx.needs_input_grad)

    Own.forward = staticmethod(forward)  # type: ignore[assignment]
    return Own.apply  # type: ignore[no-any-return]


def swish(ctx: Any, x: Tensor) -> Tensor:
    """As many write it: the argument is saved, a number noted."""
    ctx.scale = 1.702
    ctx.save_for_backward(x)
    return x * torch.sigmoid(1.702 * x)


def in_a_region(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Between two operators that save what they read."""
    return lambda *given: own(*(each.sin() for each in given)).cos()


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        pytest.param(swish, 1, id="saves-argument"),
        pytest.param(lambda ctx, x, y: x * y + torch.tensor(0.5), 2, id="two-arguments"),
        pytest.param(lambda ctx, x: (x * 2, x * 3), 1, id="two-results"),
    ],
)
def test_output_is_rebuilt_from_arguments_alone(forward: Forward, count: int) -> None:
    """Nothing is held, gradients are those of no checkpointing, and a plan says the same."""
    own = a_function(forward)

    def body(*given: Tensor) -> Tensor:
        out = own(*(each.sin() for each in given))
        return (out if isinstance(out, Tensor) else out[0]).cos()

    leaves = [leaf(6, 6) for _ in range(count)]
    assert bytes_held(body, *leaves) == 0
    assert is_plain(body, *leaves)
    plan = solve(profile(body, *leaves, unit="flops"), 0)
    assert plan
    assert is_plain(body, *leaves, policy=plan)


def test_forward_without_a_context_is_run_again() -> None:
    """`setup_context` is called after it, with what it returned."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    body, x = in_a_region(Own.apply), leaf(6, 6)
    assert bytes_held(body, x) == 0
    assert is_plain(body, x)


def drops(ctx: Any, x: Tensor) -> Tensor:
    """Draw random numbers."""
    return torch.nn.functional.dropout(x, 0.5)


def writes(ctx: Any, x: Tensor) -> Tensor:
    """Write to the argument."""
    ctx.mark_dirty(x)
    return x.mul_(2)


def clears(ctx: Any, x: Tensor) -> Tensor:
    """Write to it without a word."""
    x.zero_()
    return x + 1


def counts(ctx: Any, x: Tensor) -> Tensor:
    """Set what outlives the call."""
    counts.runs = 1  # type: ignore[attr-defined]
    return x * 2


def refuses(ctx: Any, x: Tensor) -> Tensor:
    """Take no such value."""
    if x.min() < -1:
        raise ValueError("too small")
    return x * 2


def views(ctx: Any, x: Tensor) -> Tensor:
    """Return the argument's own memory."""
    return x.view(x.shape)


def calls(ctx: Any, x: Tensor) -> Tensor:
    """Run an operator that is not torch's."""
    return torch.ops.sac_policies_tests.twice(x)


@pytest.fixture(scope="module", autouse=True)
def twice() -> Any:
    """An operator of one's own."""
    library = torch.library.Library("sac_policies_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        pytest.param(drops, "draws random numbers (aten.bernoulli", id="random"),
        pytest.param(lambda ctx, x: x * OUTSIDE, "reads a tensor that it was not", id="outside"),
        pytest.param(counts, "assigns to the attribute runs of what is not", id="attribute"),
        pytest.param(refuses, "raises ValueError: too small", id="raises"),
        pytest.param(writes, "marks arguments as written to", id="marked"),
        pytest.param(clears, "writes to its arguments", id="written"),
        pytest.param(views, "returns a view of an argument", id="view"),
        pytest.param(calls, "runs sac_policies_tests.twice.default, which", id="operator"),
        pytest.param(lambda ctx, x: x @ x, "gives something else under autocast", id="autocast"),
        pytest.param(
            lambda ctx, x: x.new_ones(x.shape, dtype=torch.float64), "was given, or", id="dtype"
        ),
    ],
)
def test_output_is_kept_where_more_decides(forward: Forward, reason: str) -> None:
    """The report says what does."""
    body, x = in_a_region(a_function(forward)), leaf(6, 6)
    found = report(body, x, policy=recompute_all(), engine="recipe")
    reasons = [each.why for each in found.saved]
    assert any(reason in why for why in reasons), reasons
    torch.manual_seed(1)
    expected = torch.autograd.grad(body(x).sum(), x)
    torch.manual_seed(1)
    assert all(map(torch.equal, expected, torch.autograd.grad(run(body, x).sum(), x)))


def test_output_is_kept_where_arguments_are_not_known() -> None:
    """A number, or a tensor without a gradient: the same function is run again in other calls."""
    own = a_function(lambda ctx, x, y: x * y)
    x = leaf(6, 6)
    for given in (2.0, torch.ones(6, 6)):
        body = in_a_region(lambda t, given=given: own(t, given))
        assert bytes_held(body, x) == SIZE
        assert is_plain(body, x)
    assert bytes_held(in_a_region(own), x, leaf(6, 6)) == 0


def test_policy_that_saves_an_operator_in_it_saves_what_it_returns() -> None:
    """As where operators are seen one by one."""
    body, x = in_a_region(a_function(swish)), leaf(6, 6)
    assert bytes_held(body, x, policy=save_ops("aten.mm")) == 0
    assert bytes_held(body, x, policy=save_ops("aten.sigmoid")) == SIZE


def test_large_arguments_are_tried_small() -> None:
    """What it takes to find out does not grow with them."""
    seen: list[int] = []

    def forward(ctx: Any, x: Tensor) -> Tensor:
        seen.append(x.numel())
        return x * 2

    body, x = in_a_region(a_function(forward)), leaf(_function_rule.MOST_ELEMENTS, 2)
    run(body, x)
    assert seen[0] == x.numel()
    assert max(seen[1:]) <= _function_rule.MOST_SIZE**2


def test_forward_that_does_something_else_later_is_noticed() -> None:
    """Nothing tells before that it reads a number outside."""
    factor = [2.0]
    body, x = in_a_region(a_function(lambda ctx, x: x * factor[0])), leaf(6, 6)
    out = run(body, x)
    factor[0] = 3.0
    with pytest.raises(MutationError, match="gives other values than the forward"):
        out.sum().backward()


def test_autocast_changes_nothing() -> None:
    """A function that it does not touch is run again without it."""
    body, x = in_a_region(a_function(swish)), leaf(6, 6)
    with torch.autocast("cpu"):
        assert is_plain(body, x)
    assert bytes_held(body, x) == 0


def test_what_the_function_saved_does_not_wait_for_its_forward() -> None:
    """Another run of the forward reads arguments at edges, not what the node holds."""

    class Rectified(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0.0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return grad * (x > 0)

    w = leaf(64, 64)

    def function(x: Tensor) -> Tensor:
        return Rectified.apply(x @ w) @ w

    for _ in range(4):
        out = run(function, leaf(64, 64))
        with Readings() as readings:
            out.sum().backward()
        assert (readings.most_made, readings.left) == (1, [])
