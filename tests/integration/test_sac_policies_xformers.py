"""Uses of xformers' selective checkpointing, done with sac-policies."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from _checks import assert_same_grads
from _models import need
from _regions import PRODUCTS, model_of, ours, step, swap
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sac_policies import checkpoint, context_fn, profile, recompute_all, solve
from sac_policies.budget import BudgetPlan, Infeasible

KNOWN = ("Found no NVIDIA driver", "list assignment index out of range")


def theirs_runs(run: Any) -> Any:
    """Return the result of xformers; an expected failure if xformers itself fails."""
    try:
        return run()
    except Exception as error:
        if any(known in str(error) for known in KNOWN):
            pytest.xfail(f"xformers itself fails here: {type(error).__name__}: {error}")
        raise


def flops(run: Any) -> int:
    """Return the FLOPs of a step."""
    model = model_of()
    with FlopCounterMode(display=False) as counter:
        step(model, run)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "policy",
    [
        [],
        PRODUCTS,
        PRODUCTS[:1],
        [torch.ops.aten.gelu.default],
        ["aten.mm.default", "aten.addmm.default"],
    ],
)
def test_a_list_of_operators(policy: list[Any]) -> None:
    """A list of operators, their `policy_fn`: gradients equal the plain model's."""
    plain = model_of()
    model = copy.deepcopy(plain)
    loss = step(plain)
    assert torch.equal(step(model, ours(policy)), loss)
    assert_same_grads(model, plain)


def test_their_own_step_is_close() -> None:
    """xformers' `checkpoint` with the same list of names gives the same loss."""
    function = need("xformers.checkpoint").checkpoint
    run = functools.partial(swap, function, policy_fn=["aten.mm.default", "aten.addmm.default"])
    loss = step(model_of())
    torch.testing.assert_close(theirs_runs(lambda: step(model_of(), run)), loss)


def test_a_function_as_policy() -> None:
    """`(ctx, op, *args, **kwargs) -> bool`, as xformers takes it."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op in PRODUCTS

    plain = model_of()
    model = copy.deepcopy(plain)
    assert torch.equal(step(plain), step(model, ours(policy)))
    assert_same_grads(model, plain)


def test_kept_products_are_not_repeated() -> None:
    """With saved products, a step has the plain step's FLOPs; without, one more forward."""
    plain = flops(None)
    assert flops(ours(PRODUCTS)) == plain
    # Forward is one of three parts of a step; the last product's result is not needed.
    assert plain < flops(ours(recompute_all())) <= plain * 4 / 3


def test_operators_are_listed() -> None:
    """`list_operators` has the names of `profile`, without views and copies for autograd."""
    block, x = model_of(1)[0], torch.randn(4, 32, requires_grad=True)
    listed = {str(op) for op in need("xformers.checkpoint").list_operators(block, x)}
    assert {op.name for op in profile(block, x).ops} <= listed


@pytest.mark.parametrize("policy", ["list", "function"])
def test_as_context_fn_of_torch(policy: str) -> None:
    """`selective_checkpoint_context_fn` by our name, under torch's checkpoint and `compile`."""
    plain = model_of()
    model = copy.deepcopy(plain)
    rules: Any = PRODUCTS if policy == "list" else lambda ctx, op, *a, **k: op in PRODUCTS

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
            block, x, use_reentrant=False, context_fn=context_fn(rules)
        )

    assert torch.equal(step(plain), step(model, run))
    assert_same_grads(model, plain)


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
def test_a_policy_from_a_budget(budget: float) -> None:
    """Instead of `selective_checkpoint_wrapper(memory_budget=)`: `profile`, then `solve`.

    The plan is used for all blocks, survives pickle, and keeps what it predicts.
    """
    plain = model_of()
    model = copy.deepcopy(plain)
    traced = profile(model[0], torch.randn(16, 32, requires_grad=True), unit="flops")
    plan = solve(traced, budget)
    if isinstance(plan, Infeasible):
        assert plan.smallest_bytes > budget * traced.total_bytes()
        plan = solve(traced, plan.smallest_bytes)
    assert isinstance(plan, BudgetPlan)
    assert plan.kept_bytes <= max(budget * traced.total_bytes(), traced.fixed_bytes())
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert torch.equal(step(plain), step(model, ours(plan)))
    assert_same_grads(model, plain)


@pytest.mark.parametrize("budget", [0.2, 0.5, 0.8])
def test_a_budget_is_used_no_worse_than_theirs(budget: float) -> None:
    """For the same budget, our plan recomputes no more than their wrapper."""
    wrap = need("xformers.checkpoint").selective_checkpoint_wrapper
    block = model_of(1)[0]
    x = torch.randn(16, 32, requires_grad=True)
    torch.manual_seed(0)
    wrapped = wrap(copy.deepcopy(block), memory_budget=budget)
    theirs_runs(lambda: wrapped(x).sum().backward())  # the first call finds the policy
    with FlopCounterMode(display=False) as counter:
        wrapped(x).sum().backward()
    their_work = counter.get_total_flops()
    traced = profile(block, x, unit="flops")
    plan = solve(traced, budget)
    if isinstance(plan, Infeasible):
        plan = solve(traced, plan.smallest_bytes)
    with FlopCounterMode(display=False) as counter:
        checkpoint(block, x, policy=plan).sum().backward()
    assert counter.get_total_flops() <= their_work
