"""What users of xformers' selective checkpointing and of torch-remat do, done with ours."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from typing import Any

import pytest
import torch
from _checks import assert_same_grads, kept_bytes
from _models import need
from _table import library
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sac_policies import (
    BudgetPlan,
    Infeasible,
    checkpoint,
    context_fn,
    from_json,
    profile,
    recompute_all,
    save_modules,
    save_ops,
    solve,
    to_json,
)

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
ENGINES = ["auto", "contexts"]


class Block(nn.Module):
    """A feed-forward network with dropout and a residual, as in xformers' own tests."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input and what is added to it."""
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def model_of(count: int = 3) -> nn.Sequential:
    """Some blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def step(model: nn.Module, run: Any = None) -> Tensor:
    """Forward and backward through every block by `run(block, x)`; the loss."""
    torch.manual_seed(1)
    x = torch.randn(16, 32, requires_grad=True)
    for block in model.children():
        x = block(x) if run is None else run(block, x)
    loss = x.pow(2).sum()
    loss.backward()
    return loss.detach()


def theirs_runs(run: Any) -> Any:
    """What xformers itself gives, or a skip: it does not work with every torch, or without CUDA."""
    try:
        return run()
    except Exception as error:
        pytest.skip(f"xformers itself fails here: {type(error).__name__}: {error}")


def _swap(function: Any, block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    out: Tensor = function(block, x, **options)
    return out


def ours(policy: Any, engine: str = "auto") -> Any:
    """Our `checkpoint` in its place."""
    return functools.partial(_swap, checkpoint, policy=policy, engine=engine)


def flops(run: Any) -> int:
    """Work of a step."""
    model = model_of()
    with FlopCounterMode(display=False) as counter:
        step(model, run)
    return int(counter.get_total_flops())


@library("xformers")
@pytest.mark.parametrize("engine", ENGINES)
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
def test_a_list_of_operators(policy: list[Any], engine: str) -> None:
    """The argument they call `policy_fn`: gradients are the plain model's."""
    plain = model_of()
    model = copy.deepcopy(plain)
    loss = step(plain)
    assert torch.equal(step(model, ours(policy, engine)), loss)
    assert_same_grads(model, plain)


@library("xformers")
def test_their_own_step_is_close() -> None:
    """xformers' `checkpoint` with the same list of names gives the same loss."""
    function = need("xformers.checkpoint").checkpoint
    run = functools.partial(_swap, function, policy_fn=["aten.mm.default", "aten.addmm.default"])
    loss = step(model_of())
    torch.testing.assert_close(theirs_runs(lambda: step(model_of(), run)), loss)


@library("xformers")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_as_policy(engine: str) -> None:
    """`(ctx, op, *args, **kwargs) -> bool`, as they take it."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op in PRODUCTS

    plain = model_of()
    model = copy.deepcopy(plain)
    assert torch.equal(step(plain), step(model, ours(policy, engine)))
    assert_same_grads(model, plain)


@library("xformers")
def test_kept_products_are_not_repeated() -> None:
    """FLOPs of a step with products kept are the plain step's, with none kept a forward more."""
    plain = flops(None)
    assert flops(ours(PRODUCTS)) == plain
    assert flops(ours(PRODUCTS, "contexts")) == plain
    # Of a step that takes three parts, forward is one; the last product's result is not read.
    assert plain < flops(ours(recompute_all(), "contexts")) <= plain * 4 / 3


@library("xformers")
def test_operators_are_listed() -> None:
    """`list_operators` names what `profile` does, views and copies for autograd left out."""
    block, x = model_of(1)[0], torch.randn(4, 32, requires_grad=True)
    listed = {str(op) for op in need("xformers.checkpoint").list_operators(block, x)}
    assert {op.name for op in profile(block, x).ops} <= listed


@library("xformers")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["list", "function"])
def test_as_context_fn_of_torch(engine: str, policy: str) -> None:
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


@library("xformers")
@pytest.mark.parametrize("engine", ["recipe", "contexts"])
@pytest.mark.parametrize("budget", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
def test_a_policy_from_a_budget(budget: float, engine: str) -> None:
    """Where they call `selective_checkpoint_wrapper(memory_budget=)`: `profile`, then `solve`.

    The plan is used for all blocks, survives pickle and JSON, and keeps what it says.
    """
    plain = model_of()
    model = copy.deepcopy(plain)
    traced = profile(model[0], torch.randn(16, 32, requires_grad=True), unit="flops")
    plan = solve(traced, budget, engine=engine)
    if isinstance(plan, Infeasible):
        assert plan.smallest_bytes > budget * traced.total_bytes(engine)
        plan = solve(traced, plan.smallest_bytes, engine=engine)
    assert isinstance(plan, BudgetPlan)
    assert plan.kept_bytes <= max(budget * traced.total_bytes(engine), traced.fixed_bytes(engine))
    for same in (
        pickle.loads(pickle.dumps(plan)),
        from_json(json.loads(json.dumps(to_json(plan)))),
    ):
        assert same == plan
    assert torch.equal(step(plain), step(model, ours(plan, engine)))
    assert_same_grads(model, plain)


@library("xformers")
@pytest.mark.parametrize("budget", [0.2, 0.5, 0.8])
def test_a_budget_is_used_no_worse_than_theirs(budget: float) -> None:
    """At the same share of what can be kept, our plan repeats no more work than their wrapper."""
    wrap = need("xformers.checkpoint").selective_checkpoint_wrapper
    block = model_of(1)[0]
    x = torch.randn(16, 32, requires_grad=True)
    torch.manual_seed(0)
    wrapped = wrap(copy.deepcopy(block), memory_budget=budget)
    theirs_runs(lambda: wrapped(x).sum().backward())  # the policy is found in the first call
    with FlopCounterMode(display=False) as counter:
        wrapped(x).sum().backward()
    their_work = counter.get_total_flops()
    traced = profile(block, x, unit="flops")
    plan = solve(traced, budget, engine="contexts")
    if isinstance(plan, Infeasible):
        plan = solve(traced, plan.smallest_bytes, engine="contexts")
    with FlopCounterMode(display=False) as counter:
        checkpoint(block, x, policy=plan, engine="contexts").sum().backward()
    assert counter.get_total_flops() <= their_work


@library("torch-remat")
def test_regions_of_source_code() -> None:
    """Where torch-remat marks a region to be saved, `save_modules` names the module."""
    remat = need("torch_remat")

    class Marked(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            up = remat.region(self.up, "up", recompute=False)(y)
            remat.recompute_needs_tensor(up)
            return x + self.down(torch.nn.functional.gelu(up))

    torch.manual_seed(0)
    plain = nn.Sequential(*(Marked() for _ in range(2)))
    for block in plain:
        block.drop.p = 0.0
    model = nn.Sequential(*(Block() for _ in range(2)))
    model.load_state_dict(plain.state_dict())
    for block in model:
        block.drop.p = 0.0
    work = {}
    runs = {
        "theirs": (plain, lambda b, x: remat.checkpoint(region_name="block")(b)(x)),
        "ours": (model, ours(save_modules("up"))),
    }
    losses = []
    for name, (either, run) in runs.items():
        with FlopCounterMode(display=False) as counter:
            losses.append(step(either, run))
        work[name] = counter.get_total_flops()
    assert torch.equal(*losses)
    assert_same_grads(model, plain)
    assert work["ours"] <= work["theirs"]


@library("torch-remat")
@pytest.mark.parametrize("engine", ENGINES)
def test_everything_is_recomputed_as_by_torch_remat(engine: str) -> None:
    """`checkpoint(region_name=)(f)(x)` and `checkpoint(f, x, policy=recompute_all())`."""
    remat = need("torch_remat")
    plain = model_of()
    for block in plain:
        block.drop.p = 0.0
    model, other = copy.deepcopy(plain), copy.deepcopy(plain)
    loss = step(plain)
    assert torch.equal(step(other, lambda b, x: remat.checkpoint(region_name="b")(b)(x)), loss)
    assert torch.equal(step(model, ours(recompute_all(), engine)), loss)
    assert_same_grads(model, plain)
    assert_same_grads(other, plain)


@library("torch-remat")
def test_dropout_in_a_region() -> None:
    """torch-remat keeps no random state; ours needs nothing said, and no bit changes."""
    need("torch_remat")
    plain = model_of()
    for engine in ENGINES:
        model = model_of()
        plain.zero_grad()
        assert torch.equal(step(plain), step(model, ours(save_ops(*PRODUCTS), engine)))
        assert_same_grads(model, plain)


@library("torch-remat")
def test_bytes_kept_beside_torch_remat() -> None:
    """With the same products kept, the recipe engine keeps no more than a marked region."""
    remat = need("torch_remat")

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x: Tensor) -> Tensor:
            up = remat.region(self.up, "up", recompute=False)(x)
            remat.recompute_needs_tensor(up)
            return self.down(torch.nn.functional.gelu(up))

    block = Marked()
    plain = nn.Sequential(block.up, nn.GELU(), block.down)
    x = torch.randn(64, 32, requires_grad=True)
    marked = kept_bytes(lambda: remat.checkpoint(region_name="b")(block)(x).sum())
    kept = kept_bytes(lambda: checkpoint(plain, x, policy=save_ops(*PRODUCTS)).sum())
    assert kept <= marked
