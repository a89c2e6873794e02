"""Errors of backward name the operator, the user's line and the rule that had decided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sac_policies import (
    MutationError,
    RecomputeError,
    checkpoint,
    profile,
    recompute_all,
    save_every_nth,
    save_ops,
    scoped,
    solve,
)
from sac_policies.engines._error_context import rule_for

MM = torch.ops.aten.mm.default
PRODUCTS, SINES = save_ops("aten.mm"), save_ops("aten.sin")
NTH, INSIDE = save_every_nth("aten.mm", n=2), scoped(PRODUCTS, "attn")


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save matrix products."""
    return op is MM


RULES = {
    "rule": (PRODUCTS | SINES, r"rule OpRule\(entries=\('aten.mm',\), answer=[^|]*>\)\)"),
    "function": (keep_products, r"rule keep_products \(at .*test_error_context.py:\d+\)"),
    "every": (NTH | SINES, r"rule EveryNth\("),
}


@pytest.mark.parametrize(
    ("policy", "speaker"),
    [
        (PRODUCTS, PRODUCTS),
        (SINES | PRODUCTS, PRODUCTS),
        (SINES | (PRODUCTS & PRODUCTS), PRODUCTS),
        (~PRODUCTS, ~PRODUCTS),
        (SINES | NTH, NTH),
        (NTH | INSIDE, NTH | INSIDE),
        (SINES | INSIDE, INSIDE),
    ],
)
def test_the_innermost_rule_that_decides_alone_is_named(policy: Any, speaker: Any) -> None:
    """Where two may have decided, both are shown."""
    assert rule_for(policy, MM) == speaker


def _products(*, times: Any = None, held: Any = None) -> Any:
    def body(p: torch.Tensor) -> torch.Tensor:
        for _ in range(next(times) if times else 0):
            p.detach() @ p.detach()
        q = p @ p
        if held is not None:
            held.append(q.detach())
        return q.sin()

    return body


def _leaf() -> torch.Tensor:
    return torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()


@pytest.mark.parametrize(("policy", "said"), RULES.values(), ids=RULES)
def test_changed_value_names_the_rule_that_kept_it(policy: Any, said: str) -> None:
    """The contexts engine: a saved output that the caller overwrote."""
    held: list[torch.Tensor] = []
    out = checkpoint(_products(held=held), _leaf(), policy=policy, engine="contexts")
    held[0].zero_()
    with pytest.raises(
        MutationError, match=rf"aten.mm.default .*test_error_context.py:\d+ in body; {said}"
    ):
        out.sum().backward()


@pytest.mark.parametrize(("policy", "said"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("runs", [(1, 2), (2, 1)], ids=["more", "fewer"])
def test_other_operators_name_the_rule_of_theirs(runs: Any, policy: Any, said: str) -> None:
    """The contexts engine: a recomputation that does other work."""
    body = _products(times=iter(runs))
    out = checkpoint(body, _leaf(), policy=policy, engine="contexts", early_stop=False)
    with pytest.raises(
        RecomputeError, match=rf"aten.mm.default .*test_error_context.py:\d+ in .*; {said}"
    ):
        out.sum().backward()


def test_debug_names_the_rule_of_the_operator_that_differs() -> None:
    """The contexts engine: operators in another order."""
    flip = iter([torch.sin, torch.cos])
    out = checkpoint(
        lambda p: next(flip)(p @ p).exp(),
        _leaf(),
        policy=~PRODUCTS,
        engine="contexts",
        debug=True,
    )
    with pytest.raises(RecomputeError, match=r"is aten.cos.default .*; rule Complement\("):
        out.sum().backward()


def test_changed_tensor_names_the_rule_of_its_producer() -> None:
    """The recipe engine: a kept product that the caller overwrote."""
    out = checkpoint(_products(), _leaf(), policy=PRODUCTS | SINES, engine="recipe")
    with torch.no_grad():
        _base_of(out).zero_()
    said = r"made by Mm was .*test_error_context.py:\d+ in .*; rule OpRule\(entries=\('aten.mm',"
    with pytest.raises(MutationError, match=said):
        out.sum().backward()


def _base_of(out: torch.Tensor) -> torch.Tensor:
    """Return what the sine reads, counted as one with what autograd holds of it."""
    saved: torch.Tensor = out.grad_fn._saved_self  # type: ignore[union-attr]  # no stubs
    return saved


def test_changed_input_names_the_policy() -> None:
    """The recipe engine: no rule speaks of what the region was given."""
    p = _leaf()
    out = checkpoint(_products(), p, policy=PRODUCTS, engine="recipe")
    with torch.no_grad():
        p.zero_()
    with pytest.raises(MutationError, match=r"test_error_context.py:\d+ in .*; policy OpRule\("):
        out.sum().backward()


def test_late_replay_names_the_rule_that_recomputes() -> None:
    """The recipe engine: an earlier backward freed what a replay reads."""
    x, w = _leaf(), _leaf()

    def function(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.nn.functional.silu(t)
        return y.sum(), y @ w

    total, product = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    total.backward()
    with pytest.raises(RecomputeError, match=r"aten.silu.default .*; rule Always\("):
        torch.autograd.grad(product.sum(), w)


def test_plan_is_the_rule_where_one_decided() -> None:
    """The recipe engine under a plan of the solver."""
    p = _leaf()
    plan = solve(profile(_products(), p), 1.0)
    out = checkpoint(_products(), p, policy=plan, engine="recipe")
    with torch.no_grad():
        p.zero_()
    with pytest.raises(
        MutationError, match=r"test_error_context.py:\d+ in .*; rule of a budget plan"
    ):
        out.sum().backward()
