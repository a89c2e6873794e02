"""What autograd holds: no cycles, checked versions, recipes that give equal gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import (
    MutationError,
    RecomputeError,
    _torch_compat,
    checkpoint,
    recompute_all,
    save_ops,
)

from ._recipe import Counts, leaf, run

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.mark.parametrize(
    "function", [torch.exp, torch.tanh, lambda x: F.silu(x).exp(), lambda x: F.layer_norm(x, (4,))]
)
@pytest.mark.parametrize("with_backward", [False, True])
def test_graph_is_freed_without_collector(
    function: Callable[[torch.Tensor], torch.Tensor], with_backward: bool
) -> None:
    """A saved own output makes no cycle: the graph goes when its output goes."""
    x = leaf(3, 4)
    out = run(lambda t: function(t * t), x)
    alive = weakref.ref(out)
    saved = weakref.ref(out.grad_fn.metadata.setdefault("probe", Counts()))
    if with_backward:
        out.sum().backward()
    del out
    assert alive() is None
    assert saved() is None


class Storages(TorchDispatchMode):
    """Notes every storage that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append(weakref.ref(out.untyped_storage()))
        return out

    @property
    def alive_bytes(self) -> int:
        """Bytes of those that somebody still has."""
        alive = {id(each): each for each in (ref() for ref in self.seen) if each is not None}
        return sum(each.nbytes() for each in alive.values())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("policy", [recompute_all(), save_ops("aten.sin")])
def test_what_an_unused_output_saved_goes_with_it(policy, nested) -> None:
    """Autograd frees the saved tensors of a branch that nobody uses; so does the engine."""
    x = torch.randn(32, 32, requires_grad=True)

    def inner(t: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(32, 32).bernoulli_()
        return (t.sin() * mask).masked_fill(mask > 0.5, 0.0)

    def function(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if nested:
            return t.cos(), checkpoint(inner, t, policy=policy, engine="recipe")
        return t.cos(), inner(t)

    with Storages() as made:
        used, unused = checkpoint(function, x, policy=policy, engine="recipe")
    with_unused = made.alive_bytes
    del unused
    assert made.alive_bytes == used.nbytes
    assert with_unused >= 3 * used.nbytes
    (found,) = torch.autograd.grad(used.sum(), x)
    assert torch.equal(found, -x.sin())


def test_mutated_kept_tensor_raises() -> None:
    """An in-place change of a kept tensor is noticed, although autograd skips its check."""
    x = leaf(3, 4)
    h = x * 2
    out = checkpoint(torch.exp, h, policy=save_ops("aten.exp"), engine="recipe")
    out.add_(1)
    with pytest.raises(MutationError, match=r"of shape \(3, 4\) made by Exp was changed in place"):
        out.sum().backward()


def test_written_result_that_is_rebuilt_gives_the_right_gradient() -> None:
    """Plain autograd refuses; the result that the node would have saved is made again."""
    x = leaf(3, 4)
    (expected,) = torch.autograd.grad(x.exp().sum(), x)
    out = run(torch.exp, x)
    out.add_(1)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, expected)


def test_mutated_input_raises() -> None:
    """An in-place change of what the region was given is noticed."""
    x = torch.ones(3)
    w = leaf(3)
    out = run(torch.mul, w, x)
    x.add_(1)
    with pytest.raises(MutationError, match="was changed in place after it was saved"):
        out.sum().backward()


def test_mutated_parameter_raises() -> None:
    """An optimiser step between forward and backward is noticed."""
    w = leaf(4, 4)
    out = run(torch.mm, leaf(2, 4), w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError, match=r"saved tensor of shape \(4, 4\) was changed"):
        out.sum().backward()


def test_mutated_bias_of_a_replay_changes_no_gradient() -> None:
    """Plain autograd does not read a bias in backward, so what becomes of it does not matter."""
    x, w, bias = leaf(2, 4), leaf(4, 4), leaf(4)
    (expected,) = torch.autograd.grad(F.silu(torch.addmm(bias, x, w)).sum(), x)
    out = run(lambda *a: F.silu(torch.addmm(*a)), bias, x, w)
    with torch.no_grad():
        bias.add_(1)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, expected)


def test_changed_recipe_value_still_gives_the_right_gradient() -> None:
    """A value that is replayed is not kept, so changing it in place afterwards is harmless."""
    x = leaf(3, 4)

    def function(t: torch.Tensor) -> torch.Tensor:
        h = F.silu(t)
        out = h.sin()
        with torch.no_grad():
            h.zero_()
        return out

    (found,) = torch.autograd.grad(run(function, x).sum(), x)
    (expected,) = torch.autograd.grad(F.silu(x).sin().sum(), x)
    assert torch.equal(found, expected)


def test_second_backward_over_a_retained_graph_is_equal() -> None:
    """retain_graph and a second backward work, with bitwise equal gradients."""
    x, w = leaf(5, 4), leaf(4, 4)
    out = run(lambda t: (F.silu(t) * t.sin()) @ w, x)
    first = torch.autograd.grad(out.sum(), [x, w], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [x, w])
    assert all(map(torch.equal, first, second))


def test_double_backward_is_equal() -> None:
    """create_graph differentiates through replays as through kept values."""
    x, w = leaf(5, 4), leaf(4, 4)

    def second(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = call(lambda t: F.gelu(F.silu(t) @ w) * t, x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, w])

    assert all(map(torch.equal, second(run), second(lambda f, *a: f(*a))))


def test_freed_producer_is_explained() -> None:
    """A replay after its producer was freed says to retain the graph."""
    x, w = leaf(5, 4), leaf(4, 4)

    def function(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.silu(t)
        return y.sum(), y @ w

    total, product = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    total.backward()
    with pytest.raises(RecomputeError, match=r"aten.silu.default is to be replayed.*retain_graph"):
        torch.autograd.grad(product.sum(), w)


def test_replay_ignores_autocast_of_backward() -> None:
    """Calling backward inside autocast replays in the dtype of the forward."""
    x, w = leaf(5, 4), leaf(4, 4)

    def function(t: torch.Tensor) -> torch.Tensor:
        return F.silu(t @ w).sin()

    out, plain = run(function, x), function(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(out.sum(), x)
        (expected,) = torch.autograd.grad(plain.sum(), x)
    assert torch.equal(found, expected)


def test_kept_operator_is_not_run_again() -> None:
    """Backward runs the product's two gradients and no forward product."""
    x, w = leaf(5, 4), leaf(4, 4)
    out = checkpoint(
        lambda t: F.silu(F.silu(t) @ w).sin(), x, policy=save_ops("aten.mm"), engine="recipe"
    )
    with Counts() as counts:
        out.sum().backward()
    assert counts.ops[aten.mm.default] == 2
    assert counts.ops[aten.silu.default] == 2


def test_sequence_number_without_torchs_own_reads_a_new_node() -> None:
    """The fallback makes a node, and gives the number of the one after it."""
    expected = _torch_compat._number_after_a_new_node()
    assert _torch_compat.node_number((leaf(2) * 2).grad_fn) == expected
