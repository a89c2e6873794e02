"""Forwards that follow the steps of the one before: where they do, and where they must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from sac_policies import MATMULS, MutationError, Policy, recompute_all, replay_rule, save_ops, span
from sac_policies._torch_compat import sequence_number
from sac_policies.engines.recipe._replay import Rule
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.policies._unmatched import subject_of

from ._recipe import bytes_kept, leaf, run

PRODUCTS = save_ops(MATMULS)


@pytest.fixture(autouse=True)
def _anew() -> None:
    """Nothing is known of functions that other tests ran: they share code."""
    known_of(PRODUCTS).repeats.forget()
    known_of(recompute_all()).repeats.forget()


def followed(function: Callable[..., Any], *args: Any, policy: Policy = PRODUCTS) -> int:
    """How many forwards followed the steps that there are now."""
    shape = known_of(policy).repeats._shape(subject_of(function), habits_of(function), args)
    return 0 if shape is None else shape.followed


def steps(function: Callable[..., Any], *args: Any, policy: Policy = PRODUCTS) -> Any:
    """The steps that there are now."""
    shape = known_of(policy).repeats._shape(subject_of(function), habits_of(function), args)
    return None if shape is None else shape.steps


def is_plain(function: Callable[..., Tensor], *given: Tensor, policy: Policy = PRODUCTS) -> bool:
    """Whether gradients are bitwise those of no checkpointing."""
    leaves = [each for each in given if each.requires_grad]
    expected = torch.autograd.grad(function(*given).sum(), leaves)
    found = torch.autograd.grad(run(function, *given, policy=policy).sum(), leaves)
    return all(map(torch.equal, expected, found))


def learnt(function: Callable[..., Tensor], *given: Tensor, policy: Policy = PRODUCTS) -> None:
    """Have it followed once."""
    for _ in range(3):
        assert is_plain(function, *given, policy=policy)
    assert followed(function, *given, policy=policy) == 1


class Gated(nn.Module):
    """A norm, two products and a gate; what is switched on is done besides.

    Attributes:
        on: names of what is done.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.one, self.two, self.out = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.on: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        made = F.silu(self.one(y))
        if "branch" in self.on:
            made = made.sin()
        if "function" in self.on:
            made = F.gelu(self.one(y))
        if "write" in self.on:
            with torch.no_grad():
                made.mul_(2.0)
        if "inside" in self.on:
            made = run(torch.sin, made)
        if "span" in self.on:
            made = span(torch.sin, "sine")(made)
        if "checkpoint" in self.on:
            made = torch.utils.checkpoint.checkpoint(torch.sin, made, use_reentrant=False)
        if "gradient" in self.on:
            made = made * torch.autograd.grad(made.sum(), x, retain_graph=True)[0].detach()
        if "fail" in self.on:
            raise KeyError("as asked")
        return self.out(made * self.two(y)) + x


@pytest.fixture
def gated() -> Gated:
    """The module."""
    return Gated()


@pytest.fixture
def x() -> Tensor:
    """Its input."""
    return leaf(4, 8)


def test_third_forward_follows(gated: Gated, x: Tensor) -> None:
    """The first is watched, the second written down."""
    learnt(gated, x)
    for _ in range(3):
        assert is_plain(gated, x)
    assert followed(gated, x) == 4


def test_follower_keeps_what_the_second_forward_kept(gated: Gated, x: Tensor) -> None:
    """Not a byte more."""
    run(gated, x, policy=PRODUCTS)
    written = bytes_kept(gated, x, policy=PRODUCTS)
    assert bytes_kept(gated, x, policy=PRODUCTS) == written
    assert followed(gated, x) == 1


@pytest.mark.parametrize(
    "change", ["branch", "function", "write", "inside", "span", "checkpoint", "gradient"]
)
def test_forward_that_does_something_else_leaves_the_steps(
    gated: Gated, x: Tensor, change: str
) -> None:
    """Its gradients are right then and ever after, as are those of who comes back."""
    learnt(gated, x)
    gated.on.add(change)
    for _ in range(3):
        assert is_plain(gated, x)
        assert followed(gated, x) <= 1
    gated.on.clear()
    for _ in range(3):
        assert is_plain(gated, x)


def test_frozen_weight_is_another_forward(gated: Gated, x: Tensor) -> None:
    """What autograd saves for it is less."""
    learnt(gated, x)
    gated.norm.requires_grad_(False)
    gated.two.requires_grad_(False)
    assert is_plain(gated, x)
    assert steps(gated, x) is None


def test_input_without_a_gradient_has_steps_of_its_own(gated: Gated, x: Tensor) -> None:
    """They stand beside the others."""
    learnt(gated, x)
    run(gated, x.detach(), policy=PRODUCTS).sum().backward()
    assert followed(gated, x) == 1


@pytest.mark.parametrize("works", [True, False])
def test_other_dtype_is_for_rules_that_work_there(
    gated: Gated, x: Tensor, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule is tried for each dtype before it is used."""
    learnt(gated, x)
    if not works:
        monkeypatch.setattr(Rule, "works", lambda rule, dtype, device: False)
    gated.to(torch.float64)
    entries = known_of(PRODUCTS).tables.anywhere
    known = {entry: dict(entry.works) for entry in entries.values() if hasattr(entry, "works")}
    assert is_plain(gated, x.detach().double().requires_grad_())
    for entry, before in known.items():  # other tests are to try it themselves
        entry.works.clear()
        entry.works.update(before)
    assert (steps(gated, x) is not None) == works


def test_autocast_leaves_the_steps(gated: Gated, x: Tensor) -> None:
    """Casts are nodes, too."""
    learnt(gated, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_plain(gated, x)
    assert steps(gated, x) is None


def test_hooks_of_others_are_asked(gated: Gated, x: Tensor) -> None:
    """Steps are not for forwards inside of them."""
    learnt(gated, x)
    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        run(gated, x, policy=PRODUCTS).sum().backward()
    assert packed
    assert followed(gated, x) == 1


def test_both_backwards_of_a_retained_graph_are_right(gated: Gated, x: Tensor) -> None:
    """What was shared in the first is made again in the second."""
    learnt(gated, x)
    out = run(gated, x, policy=PRODUCTS).sum()
    one = torch.autograd.grad(out, x, retain_graph=True)
    assert torch.equal(one[0], torch.autograd.grad(out, x)[0])


def test_double_backward_is_that_of_no_checkpointing(gated: Gated, x: Tensor) -> None:
    """Replayed values are plain to autograd."""
    learnt(gated, x)

    def twice(call: Callable[[Tensor], Tensor]) -> Tensor:
        first = torch.autograd.grad(call(x).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = twice(gated)
    assert torch.equal(twice(lambda y: run(gated, y, policy=PRODUCTS)), expected)
    assert followed(gated, x) == 2


def test_write_to_what_is_kept_is_refused(x: Tensor) -> None:
    """As in a forward that decides for itself."""
    w = leaf(8, 8)

    def product(y: Tensor) -> tuple[Tensor, Tensor]:
        made = y @ w
        return made, made.sin()

    for _ in range(3):
        made, out = run(product, x, policy=PRODUCTS)
    with torch.no_grad():
        made.add_(1.0)
    with pytest.raises(MutationError, match="changed in place"):
        out.sum().backward()
    assert followed(product, x) == 1


def test_replay_reads_small_parameters_as_they_were(gated: Gated, x: Tensor) -> None:
    """Plain autograd would not have read them: it saved what was made of them."""
    learnt(gated, x)
    expected = torch.autograd.grad(gated(x).sum(), gated.one.weight)[0]
    out = run(gated, x, policy=PRODUCTS).sum()
    gated.norm.bias.data.add_(1.0)
    assert torch.equal(torch.autograd.grad(out, gated.one.weight)[0], expected)


def test_write_between_two_savings_is_found(x: Tensor) -> None:
    """Two recipes of one value prove the same bits, or the forward leaves its steps."""
    w, on = leaf(8, 8), set()

    def function(y: Tensor) -> Tensor:
        made = (y @ w).sin()
        square = made.square()
        if on:
            made.data.add_(1.0)
        return square + made.cos()

    learnt(function, x)
    on.add("write")
    assert is_plain(function, x)
    assert followed(function, x) == 0


def test_node_of_another_thread_is_the_callers(x: Tensor) -> None:
    """Its number may be that of the node that is expected."""
    w, given, on = leaf(4, 8), [x * 2.0], set()

    def function(y: Tensor, other: Tensor) -> Tensor:
        made = y * w
        return (other if on else made).sin()

    for _ in range(3):
        run(function, x, given[0])
    assert followed(function, x, given[0], policy=recompute_all()) == 1
    number = sequence_number()

    def elsewhere() -> None:
        made = x * w
        while made.grad_fn._sequence_nr() < number:
            made = x * w
        given[0] = made

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    on.add("other")
    out = run(function, x, given[0])
    assert steps(function, x, given[0], policy=recompute_all()) is None
    expected = torch.autograd.grad(given[0].sin().sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("change", ["maker", "node", "behind", "other"])
def test_whoever_made_a_tensor_is_held_against_its_step(x: Tensor, change: str) -> None:
    """What is kept may be replayed if another made it, and what is replayed may be saved."""
    on: set[str] = set()
    policy = save_ops("aten.neg", "aten.sin")

    def function(y: Tensor) -> Tensor:
        if "node" in on:
            y.neg()
        kept = (y + y if "maker" in on else y.neg()).cos()
        before = y.square()
        made = y.sin() if "behind" in on else y.square()
        return kept + (before if "other" in on else made).view(4, 8).cos()

    learnt(function, x, policy=policy)
    on.add(change)
    assert is_plain(function, x, policy=policy)
    assert steps(function, x, policy=policy) is None


def test_node_that_saves_nothing_shifts_the_others(x: Tensor) -> None:
    """Numbers are part of a step, of what is kept as well."""
    on: set[str] = set()
    policy = save_ops("aten.neg")

    def function(y: Tensor) -> Tensor:
        if on:
            y.neg()
        return y.neg().cos()

    learnt(function, x, policy=policy)
    on.add("node")
    run(function, x, policy=policy)
    assert steps(function, x, policy=policy) is None


def test_failed_forward_leaves_nothing(gated: Gated, x: Tensor) -> None:
    """The next one follows."""
    learnt(gated, x)
    gated.on.add("fail")
    with pytest.raises(KeyError):
        run(gated, x, policy=PRODUCTS)
    gated.on.clear()
    assert is_plain(gated, x)
    assert followed(gated, x) == 2


def test_changed_rule_is_minded(x: Tensor) -> None:
    """What was kept for want of it is replayed."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            y.is_last = True  # what sets an attribute is not run again without a rule
            return y * 2.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2.0

    def function(y: Tensor) -> Tensor:
        return Double.apply(y.square()).sin()

    for _ in range(3):
        run(function, x)
    assert followed(function, x, policy=recompute_all()) == 1
    before = bytes_kept(function, x)
    replay_rule(
        Double,
        lambda y: y * 2.0,
        op=torch.ops.aten.mul.Tensor,
        probe=lambda make: Double.apply(make(5, 7)),
    )
    run(function, x)
    assert bytes_kept(function, x) < before
