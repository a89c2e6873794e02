"""sac-policies on other libraries' models, with every block as a region."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _cases import case_of, each
from _checks import assert_same_step, kept_bytes, shape_of, twins
from _models import Case, calls_of, without_cache
from torch import nn

from ckpt_wrap import checkpoint_
from sac_policies import (
    ATTENTION,
    CONVOLUTIONS,
    MATMULS,
    Policy,
    checkpoint,
    context_fn,
    first_match,
    fit_,
    offload,
    profile,
    recompute_all,
    recompute_ops,
    report,
    save_by_bytes,
    save_every_nth,
    save_ops,
    solve,
)
from sac_policies.budget import Infeasible

PRODUCTS = save_ops(MATMULS, ATTENTION, CONVOLUTIONS)
POLICIES: dict[str, Policy] = {
    "products": PRODUCTS,
    "nothing": recompute_all(),
    "every second": save_every_nth("aten.mm", "aten.addmm", n=2),
    "small": save_by_bytes(at_most=1 << 10),
    "rules": first_match(recompute_ops("aten.bmm"), PRODUCTS),
    "offload": offload("aten.mm", "aten.addmm", "aten.convolution"),
}


def in_regions(
    case: Case, model: nn.Module, wrap: Callable[[nn.Module, Callable[..., Any]], Any]
) -> None:
    """Replace the forward of each block by `wrap` of it, as users patch models."""
    for block in case.blocks_of(model).values():
        block.forward = wrap(block, block.forward)  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", list(POLICIES))
@each
def test_blocks_as_regions(case: Case, policy: str) -> None:
    """`checkpoint` around each block's forward: two steps are bit-identical, with buffers."""
    rules = POLICIES[policy]
    model, plain = twins(case)
    in_regions(case, model, lambda _, f: functools.partial(checkpoint, f, policy=rules))
    for _ in range(2):
        assert_same_step(case, model, plain, buffers=True)


@pytest.mark.parametrize("way", ["checkpoint_fn", "context_fn"])
@each
def test_through_a_checkpoint_wrapper(case: Case, way: str) -> None:
    """As the recompute function of `checkpoint_`, or as its `context_fn`."""
    if way == "context_fn" and case.name == "GPT-OSS":
        pytest.skip("torch's selective checkpointing refuses that a kept product is written to")
    model, plain = twins(case)
    before = shape_of(model)
    for block in case.blocks_of(model).values():
        if way == "checkpoint_fn":
            checkpoint_(block, checkpoint_fn=checkpoint, policy=PRODUCTS)
        else:
            checkpoint_(block, context_fn=context_fn(PRODUCTS))
    assert list(model.state_dict()) == before["names"]
    assert_same_step(case, model, plain)


@each
def test_the_whole_model_as_a_region(case: Case) -> None:
    """`checkpoint(model, **batch)`: one region around everything."""
    model, plain = twins(case)

    def whole(**inputs: Any) -> Any:
        return checkpoint(model, policy=PRODUCTS, **inputs)

    expected = case.loss(plain)
    expected.backward()
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    loss = case.loss(whole)  # type: ignore[arg-type]
    loss.backward()
    assert torch.equal(loss, expected)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


@each
def test_nothing_kept_holds_fewer_bytes(case: Case) -> None:
    """With a policy that saves nothing, a step keeps less than the plain model."""
    model, plain = twins(case)
    options = {"policy": recompute_all(), "determinism_check": "none"}
    in_regions(case, model, lambda _, f: functools.partial(checkpoint, f, **options))
    ours, theirs = (kept_bytes(lambda m=m: case.loss(m)) for m in (model, plain))
    assert ours < theirs, f"{ours} of {theirs} bytes"


@each
def test_a_plan_per_block(case: Case) -> None:
    """`profile` and `solve` for half of what each block could keep; the plan is followed."""
    model, plain = without_cache(*twins(case))
    plans: dict[str, Any] = {}
    calls = calls_of(case, plain)
    for name, (block, args, kwargs) in calls.items():
        traced = profile(block, *args, unit="flops", **kwargs)
        plan = solve(traced, "50%")
        if isinstance(plan, Infeasible):
            plan = solve(traced, plan.smallest_bytes)
        assert plan.kept_bytes <= traced.total_bytes()
        plans[name] = plan
    blocks = case.blocks_of(model)
    for name, block in blocks.items():
        if name in plans:
            block.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, block.forward, policy=plans[name]
            )
    plain.load_state_dict(model.state_dict())  # profiling ran forwards
    assert_same_step(case, model, plain, buffers=True)


@each
def test_a_report_of_a_block(case: Case) -> None:
    """`report` lists operators and kept bytes of a block, and changes nothing."""
    model, plain = without_cache(*twins(case))
    block, args, kwargs = next(iter(calls_of(case, model).values()))
    found = report(block, *args, policy=PRODUCTS, **kwargs)
    assert found.rows
    assert str(found)
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    assert_same_step(case, model, plain)


FITTED = ["Llama", "GPT-2", "BERT", "ViT", "ResNet", "Mixtral", "Mamba"]


def _loss(out: Any) -> torch.Tensor:
    loss: torch.Tensor | None = getattr(out, "loss", None)
    return out.logits.sum() if loss is None else loss


@pytest.mark.parametrize("case", [case_of(name) for name in FITTED], ids=FITTED)
def test_peaks_are_predicted(case: Case) -> None:
    """With blocks at half of their range: within 2 %; then the model is as before."""
    model, plain = twins(case)
    before = shape_of(model)
    batch = case.inputs()
    whole = fit_(model, batch, 1.0, loss=_loss)
    assert whole
    whole.undo()
    none = fit_(model, batch, 1, loss=_loss)
    assert isinstance(none, Infeasible)
    budget = (none.smallest_bytes + whole.peak_bytes) // 2
    half = fit_(model, batch, budget, loss=_loss)
    assert half
    assert half.peak_bytes <= budget
    assert half.predicted_bytes == pytest.approx(half.peak_bytes, rel=0.02)
    half.undo()
    assert shape_of(model) == before
    assert_same_step(case, model, plain)
