"""A region of recipes keeps what its policy saves and what nothing gives again, and no more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import (
    BudgetPlan,
    Policy,
    checkpoint,
    profile,
    recompute_all,
    save_all,
    save_ops,
    solve,
)


def kept(function: Callable[..., Any], *args: torch.Tensor, policy: Policy) -> list[torch.Size]:
    """Shapes that reach the hooks around the region, leaves left out."""
    shapes: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            shapes.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint(function, *args, policy=policy, engine="recipe")
    return shapes


def test_saved_operators_are_kept_and_others_are_not() -> None:
    """With mm saved its output is kept, and silu's is not."""
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)

    def function(t: torch.Tensor) -> torch.Tensor:
        return F.silu(t @ w).sin()

    assert kept(function, x, policy=save_ops("aten.mm")) == [(2, 5)]
    assert kept(function, x, policy=recompute_all()) == []
    assert kept(function, x, policy=save_all()) == [(2, 5), (2, 5)]


def test_views_are_rebuilt_from_their_producer() -> None:
    """Transposed, sliced and unbound parts of a replayed product are not kept."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    w = torch.eye(6).add(0.1).requires_grad_()

    def function(t: torch.Tensor) -> torch.Tensor:
        a, b, c = (t @ w).view(4, 3, 2).unbind(1)
        return a.sin() @ b.t() * c[:, :1].cos()

    assert (4, 2) not in kept(function, x, policy=recompute_all())
    expected = torch.autograd.grad(function(x).sum(), [x, w])
    out = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, w]), expected))


def test_own_output_is_rebuilt_and_second_outputs_are_kept() -> None:
    """exp saves its result, which its operand gives again; layer_norm's mean and rstd stay."""
    x = torch.ones(2, 3, requires_grad=True)
    assert kept(torch.exp, x, policy=recompute_all()) == []
    assert kept(torch.exp, x, policy=save_ops("aten.exp")) == [(2, 3)]
    normed = kept(lambda t: F.layer_norm(t, (3,)), x, policy=recompute_all())
    assert normed == [(2, 1), (2, 1)]


def test_region_input_is_kept() -> None:
    """What the caller made is kept, although a rule could replay it."""
    x = torch.ones(2, 3, requires_grad=True)
    assert kept(torch.sin, F.silu(x), policy=recompute_all()) == [(2, 3)]


@pytest.mark.parametrize("through", [lambda y: y, lambda y: y.view(-1)[:2], lambda y: y.detach()])
def test_value_written_to_since_it_was_made_is_kept(
    through: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A replay would give the value before the change, so the changed one is kept."""
    x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()

    def function(t: torch.Tensor) -> torch.Tensor:
        y = F.silu(t)
        with torch.no_grad():
            through(y).mul_(3)
        return y.sin()

    assert kept(function, x, policy=recompute_all()) == [(2, 3)]
    out = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, torch.autograd.grad(function(x).sum(), x)[0])


def test_save_on_cpu_sees_what_is_kept() -> None:
    """Hooks around the region receive kept tensors, and gradients stay equal."""
    x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    with save_on_cpu():
        out = checkpoint(lambda t: t.exp().sin(), x, policy=recompute_all(), engine="recipe")
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, expected)


def test_hooks_inside_the_region_are_respected() -> None:
    """Tensors saved under the user's own hooks are packed and unpacked by these alone."""
    x = torch.linspace(-1, 1, 6).requires_grad_()
    packed: list[torch.Size] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        y = F.silu(t)
        with saved_tensors_hooks(lambda s: packed.append(s.shape) or s, lambda s: s):
            return F.silu(y)

    out = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    assert packed == [(6,)]
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, torch.autograd.grad(F.silu(F.silu(x)).sum(), x)[0])


def test_inner_region_decides_for_itself() -> None:
    """A product that an inner region saves is not replayed by an outer one that saves nothing."""
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)

    def inner(t: torch.Tensor) -> torch.Tensor:
        return (t @ w).sin()

    def outer(t: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inner, t, policy=save_ops("aten.mm"), engine="recipe")
        return (y @ w.t()).sin()

    assert kept(outer, x, policy=recompute_all()) == [(2, 5), (5, 3)]  # and w.t()


@pytest.mark.parametrize("engine", ["contexts", "torch"])
@pytest.mark.parametrize("second", [0, 1])
def test_what_a_checkpoint_inside_made_last_is_its_own(engine, second, equal):
    """The next checkpoint saves it as an input; that is no node's doing, and makes it nobody's."""
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    bias = torch.randn(4, requires_grad=True)

    def inside(function, *args):
        if engine == "torch":
            return torch_checkpoint(function, *args, use_reentrant=False)
        return checkpoint(function, *args, policy=recompute_all(), engine=engine)

    def two(t):
        return torch.addmm(bias, t, w), torch.addmm(bias, t.sin(), w)

    def body(t, run):
        made = run(two, t)
        return run(torch.cos, made[1 - second]) @ made[second].sin()

    def step(run, around):
        out = around(lambda t: body(t.exp(), run), x)
        return list(torch.autograd.grad(out.square().sum(), (x, w, bias)))

    def ours(function, t):
        return checkpoint(function, t, policy=save_ops("aten.mm"), engine="recipe")

    plain = step(lambda function, *args: function(*args), lambda function, t: function(t))
    assert equal(step(inside, ours), plain)


def _attended(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Attention saves its result, and a sum reads nothing: only its own node asks for it."""
    query, key, value = (x @ part for part in weight)
    return F.scaled_dot_product_attention(query, key, value) + x


def test_tensor_is_unpacked_once_for_its_node_and_the_replay_of_what_that_saves() -> None:
    """torch's checkpoint around the region gives back each tensor only once."""
    torch.manual_seed(0)
    weight = torch.randn(3, 16, 16, requires_grad=True)
    x = torch.randn(2, 4, 8, 16, requires_grad=True)
    policy = save_ops("aten.mm")

    def region(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(_attended, x, weight, policy=policy, engine="recipe")

    for call in (region, lambda x: torch_checkpoint(region, x, use_reentrant=False)):
        plain = torch.autograd.grad(_attended(x, weight).square().sum(), (x, weight))
        for _ in range(2):
            found = torch.autograd.grad(call(x).square().sum(), (x, weight))
            assert all(map(torch.equal, found, plain))


def test_node_that_saved_under_other_hooks_is_not_replayed_through_its_edges() -> None:
    """What it saved is torch's checkpoint's to give back, and only once."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)

    def largest(t: torch.Tensor) -> torch.Tensor:
        return (t + t).max(-1).values

    def function(t: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(largest, t, use_reentrant=False).sin()

    (plain,) = torch.autograd.grad(largest(x).sin().sum(), x)
    out = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)


def test_region_that_is_run_again_reads_what_it_kept_then() -> None:
    """A gradient inside reads it in the first run and in the second, each through its own hooks."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)

    def inner(t: torch.Tensor) -> torch.Tensor:
        made = (t + t).sin()
        (grad,) = torch.autograd.grad(made.sum(), t, retain_graph=True)
        return made * grad.detach()

    def region(t: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, t, policy=recompute_all(), engine="recipe")

    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(function(x.exp()).square().sum(), x)[0]

    plain = gradient(inner)
    assert torch.equal(gradient(lambda t: torch_checkpoint(region, t, use_reentrant=False)), plain)


def test_region_around_a_checkpoint_does_not_read_what_a_region_inside_kept() -> None:
    """It reads the sum's operand itself, and nothing of the checkpoint runs again for that."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    region = partial(checkpoint, policy=recompute_all(), engine="recipe")
    runs: list[torch.Size] = []

    def inside(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(t.shape)
        made = t + t
        return made, made.sin()

    def function(t: torch.Tensor) -> torch.Tensor:
        made, _ = torch_checkpoint(lambda t: region(inside, t), t.exp(), use_reentrant=False)
        return made.cos()

    (plain,) = torch.autograd.grad((x.exp() + x.exp()).cos().sum(), x)
    (found,) = torch.autograd.grad(region(function, x).sum(), x)
    assert torch.equal(found, plain)
    assert len(runs) == 1


def test_bias_that_linear_adds_in_place_is_no_later_write() -> None:
    """Under a mode, as in a first forward and in a profile, it is added out-of-place."""
    layer = torch.nn.Linear(3, 5)
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def function(t: torch.Tensor) -> torch.Tensor:
        return layer(t.mT).sin()

    wanted = [x, *layer.parameters()]
    plain = torch.autograd.grad(function(x).square().sum(), wanted)
    plan = solve(profile(function, x, unit="flops"), 0)
    assert isinstance(plan, BudgetPlan)
    for policy in (recompute_all(), recompute_all(), plan):
        assert kept(function, x, policy=policy) == [(3, 5)]  # a view of the weight
        out = checkpoint(function, x, policy=policy, engine="recipe")
        assert all(map(torch.equal, torch.autograd.grad(out.square().sum(), wanted), plain))
