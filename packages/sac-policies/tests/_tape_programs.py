"""Random programs that write in place, take views, and differentiate inside the forward.

`outcome(seed, None)` runs a program plainly, `outcome(seed, "matmuls")` in regions of the tape
engine. Run this file to compare many: `python -m tests._tape_programs FIRST COUNT`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from sac_policies import (
    checkpoint,
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_ops,
)

from . import _programs
from ._programs import Expected

SIZE = 6
MATMULS = ("aten.mm", "aten.addmm", "aten.bmm")
_OPERATORS = """
    mm addmm bmm sin cos mul add add_ mul_ view t slice select cat clone relu_ copy_ gelu tanh
    repeat expand detach sigmoid_ index _softmax native_layer_norm where native_dropout split unbind
    transpose sum _unsafe_view zeros zeros_like masked_fill_ unsqueeze topk native_batch_norm silu
"""
OPERATORS = _OPERATORS.split()


@dataclass
class Program:
    """The state that the steps of a program use."""

    choose: random.Random
    pool: list[torch.Tensor]
    weight: torch.Tensor
    scale: torch.Tensor
    buffers: list[torch.Tensor]
    norm: torch.nn.Module
    region: Callable[..., torch.Tensor]
    depth: int = 0
    steps: list[str] = field(default_factory=list)

    def tensor(self) -> torch.Tensor:
        """Choose a tensor."""
        return self.choose.choice(self.pool)

    def square(self) -> torch.Tensor:
        """Choose a tensor and bring it into the usual shape."""
        return squared(self.tensor())

    def inside(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        """Run another program with the same weights and buffers, and return a tensor."""
        shared = (self.weight, self.scale, self.buffers, self.norm, self.region, self.depth + 1)
        return Program(random.Random(seed), [x], *shared).run()

    def run(self) -> torch.Tensor:
        """Run some steps and sum their results."""
        for _ in range(self.choose.randrange(3, 14)):
            step = self.choose.choices(STEPS, WEIGHTS)[0]
            self.steps.append(step.__name__)
            step(self)
        total: Any = sum(squared(each).tanh() for each in self.pool[-3:])
        return total + 0


STEPS: list[Callable[[Program], None]] = []
WEIGHTS: list[int] = []


def step(weight: int = 1) -> Callable[[Callable[[Program], None]], Callable[[Program], None]]:
    """Register a kind of step; it is drawn with this weight."""

    def add(function: Callable[[Program], None]) -> Callable[[Program], None]:
        STEPS.append(function)
        WEIGHTS.append(weight)
        return function

    return add


def squared(tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor into the usual shape, by repeating or cutting it."""
    flat = tensor.reshape(-1)
    times = -(-SIZE * SIZE // max(1, flat.numel()))
    return flat.repeat(times)[: SIZE * SIZE].view(SIZE, SIZE)


class Product(torch.autograd.Function):
    """Saves inputs, its output and an intermediate value."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        between = a.sin()
        out = between * b
        ctx.save_for_backward(a, b, between, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b, between, out = ctx.saved_tensors
        return grad * b * a.cos() + grad * out * 0.1, grad * between


class Opaque(torch.autograd.Function):
    """Writes its outputs with numpy, as a kernel outside of torch does."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        out, half = torch.empty_like(a), torch.zeros_like(a)
        out.numpy()[...] = a.detach().numpy() * 2 + 1
        half.numpy()[...] = out.numpy() * 0.5
        ctx.save_for_backward(out, half)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        out, half = ctx.saved_tensors
        return 2 * grad + grad * out * 1e-3 + grad * half * 1e-3


class Dirty(torch.autograd.Function):
    """Writes to its input and marks it dirty."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a.clone())
        a.mul_(1.5)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.5 + ctx.saved_tensors[0] * 0


def view_of(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """Take a view of a tensor."""
    dims, first = tensor.dim(), tensor.shape[0] if tensor.dim() else 0
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: tensor.reshape(-1),
        lambda: tensor.unsqueeze(0).squeeze(0),
        lambda: tensor,
    ]
    if dims:
        ways += [
            lambda: tensor[choose.randrange(first)],
            lambda: tensor[: max(1, first // 2)],
            lambda: choose.choice(tensor.chunk(2, choose.randrange(dims))),
            lambda: choose.choice(tensor.unbind(choose.randrange(dims))),
            lambda: tensor.narrow(0, 0, max(1, first - 1)),
        ]
    if dims > 1:
        ways += [lambda: tensor.transpose(0, 1), lambda: tensor.diagonal()]
    if tensor.is_contiguous() and tensor.numel() > 3:
        ways.append(lambda: tensor.view(-1)[::2])
    if dims == 2 and tensor.is_contiguous():
        shape = (first, max(1, tensor.shape[1] // 2))
        ways.append(lambda: tensor.as_strided(shape, tensor.stride()))
    return choose.choice(ways)()


def is_part(tensor: torch.Tensor) -> bool:
    """Whether autograd refuses writes to the tensor: it is one of several views of one call."""
    name = "" if tensor.grad_fn is None else tensor.grad_fn.name()
    return "Split" in name or "Unbind" in name


@step(9)
def write(p: Program) -> None:
    """Write to a tensor, or to a view of one."""
    tensor = p.tensor()
    if tensor.is_leaf and tensor.requires_grad:
        return
    t = tensor if is_part(tensor) else view_of(tensor, p.choose)
    if is_part(t):
        return
    other = squared(p.tensor()).reshape(-1)[:1]
    ways: list[Callable[[], Any]] = [
        lambda: t.mul_(0.7),
        lambda: t.add_(0.3),
        lambda: t.copy_(other.expand(t.shape) if t.numel() else t),
        t.relu_,
        lambda: t.masked_fill_(t.detach() > 0.3, 0.2),
        t.zero_,
        t.sigmoid_,
        lambda: t.clamp_(-0.9, 0.9),
        lambda: F.dropout(t, 0.3, inplace=True),
        lambda: t.add_(t.detach().sin()),
    ]
    if t.dim():
        at = torch.tensor([0])
        ways += [
            lambda: t.index_put_((at,), torch.tensor(0.5)),
            lambda: t.__setitem__(0, 0.25),
            lambda: t.index_add_(0, at, t[:1].detach() * 0.5),
        ]
    if t.dim() == 2 and t.shape[0] == t.shape[1] and t.is_contiguous():
        ways.append(lambda: t.addmm_(t.detach().clone(), t.detach().clone(), alpha=0.1))
    p.choose.choice(ways)()


@step(8)
def compute(p: Program) -> None:
    """Compute with one of the common operators."""
    a, b = p.square(), p.square()
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: a @ p.weight,
        lambda: a @ p.weight.t(),
        lambda: a * b,
        lambda: a + b,
        lambda: F.gelu(a),
        lambda: a.sin(),
        lambda: a.softmax(-1),
        lambda: torch.addmm(b, a, p.weight),
        lambda: F.silu(a) * b,
        lambda: torch.bmm(a[None], b[None])[0],
    ]
    p.pool.append(p.choose.choice(ways)())


@step(4)
def take_view(p: Program) -> None:
    """Add a view."""
    p.pool.append(squared(view_of(p.tensor(), p.choose)))


@step()
def reduce(p: Program) -> None:
    """Scale a tensor by a sum of a view."""
    a = p.tensor()
    p.pool.append(view_of(a, p.choose).sin().sum() * a)


@step()
def without_gradients(p: Program) -> None:
    """Write, and compute, under no_grad."""
    t = p.tensor()
    with torch.no_grad():
        if p.choose.random() < 0.5 and not (t.is_leaf and t.requires_grad):
            t.mul_(0.9)
        p.pool.append(p.square().cos())


@step()
def detach(p: Program) -> None:
    """Add a detached alias: writes to it reach the storage without autograd."""
    p.pool.append(p.tensor().detach())


@step()
def functions(p: Program) -> None:
    """Call autograd Functions."""
    kind = p.choose.randrange(3)
    if kind == 0:
        p.pool.append(Product.apply(p.square(), p.square()))
    elif kind == 1:
        p.pool.append(Opaque.apply(p.square()))
    else:
        p.pool.append(Dirty.apply(p.square() * 1.0))


@step(2)
def buffers(p: Program) -> None:
    """Write to buffers outside of the region, and read them."""
    ones, rows = p.buffers
    if p.choose.random() < 0.5:
        ones.add_(p.square().detach().mean())
        p.pool.append(p.square() * ones)
    else:
        rows[p.choose.randrange(SIZE)].copy_(p.square().detach()[0])
        p.pool.append(p.square() @ rows)


@step()
def dropout(p: Program) -> None:
    """Drop elements."""
    p.pool.append(F.dropout(p.tensor(), 0.4))


@step()
def choose_largest(p: Program) -> None:
    """Use the values and indices of a top-k."""
    values, places = p.square().topk(3, -1)
    p.pool.append(squared(values) + places.float().mean())


@step()
def index(p: Program) -> None:
    """Read rows by integers."""
    p.pool.append(p.square()[torch.arange(SIZE).flip(0)])


@step()
def attention(p: Program) -> None:
    """Call attention."""
    q = p.square().view(1, 2, SIZE, 3)
    out = F.scaled_dot_product_attention(q, q.cos(), q.sin(), is_causal=True)
    p.pool.append(out.reshape(SIZE, SIZE))


@step()
def norms(p: Program) -> None:
    """Normalise, with statistics that are written or read."""
    a = p.square()
    way = p.choose.random() < 0.5
    p.pool.append(F.layer_norm(a, (SIZE,), p.scale, None) if way else p.norm(a))


@step()
def gradient_inside(p: Program) -> None:
    """Differentiate inside the forward."""
    z = p.square().detach().requires_grad_()
    grad = torch.autograd.grad((z @ p.weight.detach()).sin().sum(), z)[0]
    p.pool.append(p.square() + grad)


@step()
def write_to_out(p: Program) -> None:
    """Write through `out=`."""
    out = torch.empty(SIZE, SIZE)
    torch.mul(p.square().detach(), 2.0, out=out)
    p.pool.append(p.square() * out)
    torch.add(out, 1.0, out=out)


@step()
def split(p: Program) -> None:
    """Split and join."""
    first, second = torch.split(p.square(), [2, 4])
    p.pool.append(torch.cat([second.cos(), first]))


@step()
def change_geometry(p: Program) -> None:
    """Make a tensor a view in place."""
    t = p.square().clone()
    t.t_()
    t.unsqueeze_(0)
    p.pool.append(t.squeeze_(0).exp().clamp(max=2))


@step()
def where(p: Program) -> None:
    """Choose between two tensors."""
    a = p.square()
    p.pool.append(torch.where(a > 0, p.square(), a.tanh()))


@step()
def forget(p: Program) -> None:
    """Delete a tensor."""
    if len(p.pool) > 2:
        p.pool.pop(p.choose.randrange(1, len(p.pool)))


@step()
def region(p: Program) -> None:
    """Run a region inside."""
    if p.depth < 2:
        seed, policy = p.choose.randrange(1 << 30), p.choose.randrange(1 << 30)
        p.pool.append(p.region(lambda t: p.inside(t, seed), p.square(), policy))


@step()
def foreach(p: Program) -> None:
    """Write to tensors in a list."""
    t = p.square() * 1.0
    torch._foreach_mul_([t], 0.5)
    p.pool.append(t)


@step()
def torch_checkpoint(p: Program) -> None:
    """Checkpoint a part with torch."""
    a = p.square()
    out = torch.utils.checkpoint.checkpoint(
        lambda t: (t.sin() @ p.weight).cos(), a, use_reentrant=False
    )
    p.pool.append(out)


@step()
def expand(p: Program) -> None:
    """Read elements several times."""
    p.pool.append(p.square().expand(3, SIZE, SIZE).sum(0))


@step()
def complex_numbers(p: Program) -> None:
    """Conjugate lazily."""
    p.pool.append(squared(torch.complex(p.square(), p.square()).conj().abs()))


def policy_of(seed: int, mode: str) -> Any:
    """Return the policy of a region."""
    if mode == "nothing":
        return recompute_all()
    if mode == "matmuls":
        return save_ops(*MATMULS)
    choose = random.Random(seed)
    names = [f"aten.{each}" for each in choose.sample(OPERATORS, choose.randrange(1, 12))]
    some = save_ops(*names)
    if mode == "subset":
        return some
    others = [~some, offload(some), save_all(), save_by_bytes(at_most=140)]
    return choose.choice([*others, save_every_nth(*names, n=2)])


# Changes after the forward; most programs have none.
CHANGES = (*["none"] * 6, "write out", "write x", "write w", "retain", "double", "none")


def change_of(seed: int) -> str:
    """Return the change made after the forward of a program."""
    return CHANGES[(seed // 7) % len(CHANGES)]


def outcome(seed: int, mode: str | None) -> list[torch.Tensor | None]:
    """Run a program, forward and backward, and return all its results."""
    torch.manual_seed(seed)
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    w = (torch.randn(SIZE, SIZE) * 0.4).requires_grad_()
    norm = torch.nn.BatchNorm1d(SIZE).train(seed % 3 > 0)
    buffers = [torch.ones(SIZE, SIZE), torch.randn(SIZE, SIZE)]

    def region(function: Any, t: torch.Tensor, policy: int) -> torch.Tensor:
        if mode is None:
            return function(t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return checkpoint(function, t, policy=policy_of(policy, mode))

    outer = Program(random.Random(seed), [x], w, w[0], buffers, norm, region, -1)
    given = x * 1.0
    out = region(lambda t: outer.inside(t, seed), given, seed)
    out = region(lambda t: outer.inside(t, seed + 1), out, seed + 5)
    drawn = torch.rand(1)
    loss = out.square().mean()
    change = change_of(seed)
    with torch.no_grad():
        for name, tensor in (("write out", out), ("write x", given), ("write w", w)):
            if change == name:
                tensor.mul_(0.5)
    found = _gradients(loss, [x, w, norm.weight, norm.bias], change)
    left = [*buffers, norm.running_mean, norm.running_var, norm.num_batches_tracked.float()]
    return [loss.detach(), drawn, *found, *left]


def _gradients(loss: torch.Tensor, leaves: list[Any], change: str) -> list[torch.Tensor | None]:
    if change == "retain":
        first = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, leaves, allow_unused=True)]
    if change != "double":
        return list(torch.autograd.grad(loss, leaves, allow_unused=True))
    first = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=True)
    total: Any = sum(each.square().sum() for each in first if each is not None)
    if not total.requires_grad:
        return list(first)
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def expected(seed: int) -> Expected:
    """Run a program plainly, or with saved copies where autograd refuses it."""
    writes = change_of(seed).startswith("write")
    return _programs.expected(partial(outcome, seed, None), copies=not writes)


def verdict(seed: int, mode: str, right: Expected) -> str:
    """Compare a program under the tape with its expected outcome."""
    return _programs.verdict(partial(outcome, seed, mode), right, f" after {change_of(seed)}")


if __name__ == "__main__":
    _programs.compare(lambda seed, mode: iter([verdict(seed, mode, expected(seed))]))
