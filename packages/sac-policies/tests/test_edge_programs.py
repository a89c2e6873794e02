"""Random programs whose replays read at edges, run several times and changed now and then."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sac_policies import MATMULS, Policy, recompute_all, save_ops
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.policies._unmatched import subject_of

from ._recipe import Counts, Readings, leaf, run

Link = Callable[[Tensor, Tensor], Tensor]


def _turned(y: Tensor, w: Tensor) -> Tensor:
    one, other = y.chunk(2, -1)
    return y * w + torch.cat((-other, one), -1) * w.t()


def _normed(y: Tensor, w: Tensor) -> Tensor:
    return w[0] * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6))


def _attended(y: Tensor, w: Tensor) -> Tensor:
    heads = y.view(2, 4, 2, 4).transpose(1, 2)
    made = F.scaled_dot_product_attention(heads, heads + w[0, :4], heads, is_causal=True)
    return y + made.transpose(1, 2).reshape(8, 8)


def _written(y: Tensor, w: Tensor) -> Tensor:
    made = y + w
    made += y
    return made.sin()


def _shared(y: Tensor, w: Tensor) -> Tensor:
    made = y * w
    made /= (y - w).exp()  # the graph saves a copy of what it was
    return (made + y).sin()


class _Gated(torch.autograd.Function):
    """Saves what it is given, which its forward finds at the node's edge when it is run again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * torch.sigmoid(1.702 * y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        s = torch.sigmoid(1.702 * y)
        return grad * (s + 1.702 * y * s * (1.0 - s))


LINKS: tuple[Link, ...] = (
    _turned,
    _normed,
    _attended,
    _written,
    _shared,
    lambda y, w: _Gated.apply(y @ w) * w + y,
    lambda y, w: y @ w,
    lambda y, w: F.silu(y @ w) * (y + w),
    lambda y, w: (y + w).cos() - y,
    lambda y, w: torch.where(y.detach() > 0, y.neg(), w).exp().tanh(),
    lambda y, w: y + F.dropout(y - w, 0.3),
    lambda y, w: F.layer_norm(y + w, (8,), w[0], w[1]),
    lambda y, w: torch.stack((y, w)).sum(0).sin(),
    lambda y, w: (y - w).t().contiguous().softmax(-1),
    lambda y, w: (y + w).to(torch.float64).sin().to(torch.float32),
    lambda y, w: y.repeat(2, 1)[4:12].cos() * (y + 1.0),
    lambda y, w: (y + w).relu_() + (y @ w).relu_(),
    lambda y, w: (y + w).sin() if y.sum() > 0 else (w - y).sin(),
    lambda y, w: (y * w).unbind(0)[3].expand(8, 8).cos() + y,
)
POLICIES: tuple[Policy, ...] = (
    recompute_all(),
    recompute_all(),
    save_ops(MATMULS),
    save_ops("aten.add", "aten.mm"),
)


def _bits(given: tuple[Tensor | None, ...]) -> list[list[int] | None]:
    """Gradients as words: what is no number equals itself."""
    return [None if g is None else g.view(torch.int32).flatten().tolist() for g in given]


def _gradients(out: Tensor, leaves: list[Tensor], way: str) -> list[list[int] | None]:
    """Gradients of a result, taken in one of several ways."""
    if way == "twice":
        once = torch.autograd.grad(out.sum(), leaves, create_graph=True, allow_unused=True)
        square = sum(g.square().sum() for g in once if g is not None)
        if not isinstance(square, Tensor) or not square.requires_grad:
            return _bits(once)
        return _bits(torch.autograd.grad(square, leaves, allow_unused=True))
    again = way == "again"
    found = _bits(torch.autograd.grad(out.sum(), leaves, allow_unused=True, retain_graph=again))
    if again:
        assert _bits(torch.autograd.grad(out.sum(), leaves, allow_unused=True)) == found
    return found


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("seed", range(150))
def test_programs_that_change_now_and_then(seed: int) -> None:
    """Each forward has gradients as without checkpointing, bit by bit, whoever follows."""
    rng = random.Random(seed)
    program = [rng.choice(LINKS) for _ in range(rng.randrange(2, 7))]
    w, policy = leaf(8, 8), rng.choice(POLICIES)

    def function(y: Tensor) -> Tensor:
        for link in program:
            y = link(y, w)
        return y

    known_of(policy).repeats.forget()
    for turn in range(8):
        if turn > 3 and rng.random() < 0.5:
            program[rng.randrange(len(program))] = rng.choice(LINKS)
        if turn > 3 and rng.random() < 0.2:
            w.requires_grad_(not w.requires_grad)
        made = (torch.rand(8, 8) - 0.5).requires_grad_()
        leaves = [each for each in (made, w) if each.requires_grad]
        way = rng.choice(["once", "again", "once" if _attended in program else "twice"])
        both = []
        with torch.autocast("cpu", torch.bfloat16, enabled=turn > 3 and rng.random() < 0.2):
            for call in (function, lambda y: run(function, y, policy=policy)):
                torch.manual_seed(turn)
                x = made * 2.0 if seed % 3 == 0 else made  # given, and no leaf
                both.append(call(x))
        plain, out = (_gradients(each, leaves, way) for each in both)
        assert out == plain


@pytest.mark.parametrize("seed", range(60))
def test_value_is_made_once_and_gone_with_its_last_reader(seed: int) -> None:
    """In the first forward, in those that follow, and in one that leaves their steps."""
    rng = random.Random(seed)
    program = [rng.choice(LINKS) for _ in range(rng.randrange(2, 7))]
    w, now = leaf(8, 8), [0]

    def function(y: Tensor) -> Tensor:
        for at, link in enumerate(program):
            y = link(y, w)
            if at == len(program) // 2 and now[0] == 3:
                y = y.cos().tanh() * y
        return y * w

    known_of(recompute_all()).repeats.forget()
    for now[0] in range(4):
        out = run(function, leaf(8, 8))
        with Readings() as readings:
            out.sum().backward()
        assert (readings.most_made, readings.left) == (1, [])


def test_what_a_replay_reads_of_its_node_is_made_once() -> None:
    """The index that a node saved is made by calls: for its backward, and for its replay."""
    w = leaf(64, 64)

    def function(y: Tensor) -> Tensor:
        made = (y @ w).softmax(-1)
        picked = made.gather(-1, made.topk(8).indices)
        return (picked * picked.exp()) @ w[:8]

    for _ in range(4):
        out = run(function, leaf(64, 64))
        with Readings() as readings, Counts() as counts:
            out.sum().backward()
        assert (counts.ops[torch.ops.aten.topk.default], readings.most_made) == (1, 1)


def _followed(function: Callable[..., Tensor], x: Tensor) -> int:
    shape = known_of(recompute_all()).repeats._shape(
        subject_of(function), habits_of(function), (x,)
    )
    return 0 if shape is None else shape.followed


@pytest.mark.parametrize("link", LINKS[:-2])
def test_each_link_is_followed(link: Link) -> None:
    """Programs of them try something."""
    w, x = leaf(8, 8), leaf(8, 8)

    def function(y: Tensor) -> Tensor:
        return link(y, w) * y

    for _ in range(4):
        run(function, x).sum().backward()
    assert _followed(function, x) == 2


GIVEN: tuple[Callable[[Tensor, Tensor, float], Tensor], ...] = (
    lambda y, w, a: (y.sin() + a).cos(),
    lambda y, w, a: (a - y * w).tanh(),
    lambda y, w, a: 0.5 * y * (a + torch.tanh(y + 0.04 * y.pow(3))),
    lambda y, w, a: (y + w).masked_fill(y.detach() > a, a).sin(),
    lambda y, w, a: torch.cat((y.neg(), torch.full((32, 2), a)), -1)[:, :32].cos() + y,
    lambda y, w, a: F.pad(y - w, (1, -1), value=a).cos(),
    lambda y, w, a: (y + torch.full((32,), a)).cos() * w,
    lambda y, w, a: F.linear(y, w, torch.full((32,), a)).softmax(-1),
    lambda y, w, a: torch.where(y.detach() > 0, y.neg(), a).exp().sin(),
    lambda y, w, a: F.dropout(y + a, 0.3),
)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("seed", range(60))
def test_programs_of_what_calls_are_given(seed: int) -> None:
    """Numbers and constants that no node knows, others in each forward."""
    rng = random.Random(seed)
    program = [rng.choice(GIVEN) for _ in range(rng.randrange(2, 5))]
    w, policy = leaf(32, 32), rng.choice(POLICIES)
    now = [0.5]

    def function(y: Tensor) -> Tensor:
        for link in program:
            y = link(y, w, now[0])
        return y

    known_of(policy).repeats.forget()
    for turn in range(8):
        if turn > 3 and rng.random() < 0.4:
            program[rng.randrange(len(program))] = rng.choice(GIVEN)
        now[0] = rng.random()
        x = (torch.rand(32, 32) - 0.5).requires_grad_()
        way, both = rng.choice(["once", "again", "twice"]), []
        for call in (function, lambda y: run(function, y, policy=policy)):
            torch.manual_seed(turn)
            both.append(call(x))
        plain, out = (_gradients(each, [x, w], way) for each in both)
        assert out == plain
