"""A region of the recipe engine saves the same in its forward and when others run it again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import (
    Decision,
    EngineError,
    as_policy,
    checkpoint,
    offload,
    recompute_all,
    report,
    save_by_bytes,
    save_by_flops,
    save_by_index,
    save_by_shape,
    save_every_nth,
    save_ops,
    scoped,
)
from sac_policies.engines.recipe import _run

from ._recipe import leaf

recipe = functools.partial(checkpoint, policy=recompute_all(), engine="recipe")


def _clamped(t: torch.Tensor) -> torch.Tensor:
    a = t.sin() * t
    z = (a + a.cos()).exp()
    first = z.cos()
    z.data[1:].mul_(0.5)
    return first + z.sin() * z


def _under_no_grad(t: torch.Tensor) -> torch.Tensor:
    a = t.exp() + t
    with torch.no_grad():
        a.mul_(0.5)
    return (a + a.tanh()).sin() * a


def _strided(t: torch.Tensor) -> torch.Tensor:
    a = (t + 1.0).t().clone()
    return (a * 2.0).t().cos() * t.tanh()


def _linear(t: torch.Tensor, layer=nn.Linear(4, 4)) -> torch.Tensor:  # noqa: B008
    return F.silu(layer(t.view(1, 3, 4)).view(3, 4)) * t


BODIES = [_clamped, _under_no_grad, _strided, _linear]


class _Part(nn.Module):
    """A function that nobody has seen before."""

    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.body(t)


def _contexts(function, t):
    return checkpoint(function, t, policy=save_ops("aten.sum"), engine="contexts")


def _on_cpu(function, t):
    with torch.autograd.graph.save_on_cpu():
        return function(t)


def _twice(function, t):
    return recipe(lambda u: torch_checkpoint(function, u.sin(), use_reentrant=False), t)


AROUND = [
    functools.partial(torch_checkpoint, use_reentrant=False),
    functools.partial(torch_checkpoint, use_reentrant=False, early_stop=False),
    functools.partial(torch_checkpoint, use_reentrant=True),
    _contexts,
    _on_cpu,
    _twice,
]


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("around", AROUND, ids=["torch", "whole", "reentrant", "own", "cpu", "two"])
@pytest.mark.parametrize("body", BODIES)
def test_first_steps_inside_others_hooks_are_plains(body, around, equal):
    """What the first forward teaches does not change what its recomputation saves."""
    part = _Part(body)
    for _ in range(3):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        before = (lambda t: t.sin()) if around is _twice else (lambda t: t)
        wanted = torch.autograd.grad(body(before(x)).sum(), x)
        out = around(lambda t: recipe(part, t) + 1, x)
        out.sum().backward()
        assert equal([x.grad], list(wanted))


def test_habits_learned_after_a_forward_do_not_change_its_recomputation(equal):
    """Functions of one code: a later one writes past a counter, an earlier one does not."""

    def of(body):
        return lambda t: body(t)

    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    clean = torch_checkpoint(lambda t: recipe(of(_linear), t), x, use_reentrant=False)
    other = save_ops("aten.cos")  # under another policy it is watched again
    out = clean.sum() + recipe(of(_clamped), x, policy=other).sum()
    assert _run.habits_of(of(_linear))
    wanted = torch.autograd.grad(_linear(x).sum() + _clamped(x).sum(), x)
    assert equal(list(torch.autograd.grad(out, x)), list(wanted))


def test_function_without_a_habit_is_watched_once_inside_others_hooks(monkeypatch):
    """Watching costs a dispatch mode."""
    watched = []
    whole = _run.Region.watched

    def counting(self, function):
        watched.append(function)
        return whole(self, function)

    monkeypatch.setattr(_run.Region, "watched", counting)
    for body, times in [(_linear, 1), (_clamped, 6)]:
        watched.clear()
        run = functools.partial(recipe, _Part(body))
        for _ in range(3):
            x = torch.ones(3, 4, requires_grad=True)
            torch_checkpoint(run, x, use_reentrant=False).sum().backward()
        assert len(watched) == times


def test_input_that_a_checkpoint_saves_is_no_result_of_the_node_before_it(equal):
    """A region inside kept it as its own node's result; then a checkpoint saves it again."""
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()

    def body(t, inner):
        y = inner(t)
        return torch_checkpoint(lambda u: u.sin() * u, y, use_reentrant=False).tanh()

    def kept(t):
        return checkpoint(lambda u: (u * 2).exp(), t, policy=save_ops("aten.exp"), engine="recipe")

    wanted = torch.autograd.grad(body(x, lambda t: (t * 2).exp()).sum(), x)
    out = recipe(lambda t: body(t, kept), x)
    assert equal(list(torch.autograd.grad(out.sum(), x)), list(wanted))


def _wide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return ctx.out_bytes > 200


ONLY_CONTEXTS = {
    "one call in n": (save_every_nth("aten.mm", n=2), "single calls"),
    "listed calls": (save_by_index({("aten.mm.default", 1): Decision.SAVE}), "single calls"),
    "size": (save_by_bytes(at_least=100), "single calls"),
    "shape": (save_by_shape((None, 6)), "single calls"),
    "work": (save_by_flops(at_least=10), "single calls"),
    "function": (as_policy(_wide), "single calls"),
    "size in a module": (scoped(save_by_bytes(at_least=100), "0"), "single calls"),
    "offloading": (offload("aten.mm"), "saved-tensor hooks only keep or replay"),
}
"""What the page of the recipe engine says that only the contexts engine follows."""


@pytest.mark.parametrize("kind", ONLY_CONTEXTS)
def test_what_only_contexts_follow(kind: str) -> None:
    """It does, as does "auto"; this engine refuses it and says why."""
    policy, reason = ONLY_CONTEXTS[kind]
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    x = leaf(6, 6)
    wanted = torch.autograd.grad(model(x).sum(), x)
    for engine in ("contexts", "auto"):
        out = checkpoint(model, x, policy=policy, engine=engine)
        assert torch.equal(*wanted, *torch.autograd.grad(out.sum(), x))
    with pytest.raises(EngineError, match=reason):
        checkpoint(model, x, policy=policy, engine="recipe")


def test_debugging_takes_contexts() -> None:
    """It compares operators with those of a second forward, of which this engine has none."""
    told = report(leaf(6, 6).sin, policy=recompute_all(), debug=True)
    assert "debug=True compares operators" in told.why
