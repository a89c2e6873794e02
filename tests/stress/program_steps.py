"""Building blocks of random programs: values, steps, and changes after a forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sac_policies as sp
from stress.state_steps import State

SIZE = 6
Values = list[torch.Tensor]


@dataclass
class World:
    """Parameters, an input and a cache of one run; built again for each run."""

    seed: int
    checkpoints: bool = False
    cache: dict[str, Any] = field(default_factory=dict)
    kept: Values = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        rng = random.Random(self.seed)
        wide = rng.random() < 0.2
        self.size = size = 96 if wide else SIZE
        self.x = torch.randn(size, size, requires_grad=True)
        self.w = torch.randn(size, size).mul_(size**-0.5).requires_grad_()
        self.linear = nn.Linear(size, size)
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.RMSNorm(size), nn.GroupNorm(2, size)])
        self.conv = nn.Conv1d(size, size, 3, padding=1)
        self.batch = nn.BatchNorm1d(size).train(rng.random() < 0.5)
        self.table = nn.Embedding(size, size)
        self.modules = nn.ModuleList([self.linear, self.norms, self.conv, self.batch, self.table])
        self.scale = torch.full((size,), 1.25)
        self.state = State(size)
        # Values with a history: the arguments and the closure of the program.
        self.given, self.found = self.x * 1.0, self.w.sin()

    @property
    def leaves(self) -> Values:
        """Return the tensors to differentiate with respect to."""
        return [self.x, self.w, *self.modules.parameters()]

    @property
    def changeable(self) -> Values:
        """Return the tensors that may change between forward and backward."""
        return [*self.leaves, self.scale, *self.buffers, self.given, self.found]

    @property
    def buffers(self) -> Values:
        """Return the tensors that programs write to."""
        return [*self.modules.buffers(), *self.state.tensors]


def _rows(y: torch.Tensor, world: World) -> torch.Tensor:
    return torch.arange(y.shape[0]) % world.size


def _into_row(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y @ w.w
    z[1].add_(0.3)
    z[0].copy_(y[2])
    return z


def _through_view(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y @ w.w
    z.view(-1).mul_(0.7)
    return z


def _masked(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y * 1.5
    z.masked_fill_(y.detach() > 0.4, 0.1)
    return z


def _reshaped(y: torch.Tensor, w: World) -> torch.Tensor:
    z = F.silu(y @ w.w)
    z.unsqueeze_(0).transpose_(1, 2)
    return z.squeeze_(0).t_().sin()


def _strided(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y * 2
    z.as_strided_(tuple(y.shape), (1, y.shape[0]))
    return z.cos()


def _hooked(y: torch.Tensor, w: World) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda g: g * 1.5)
    w.w.register_hook(lambda g: g * 0.5)
    return y @ w.w


def cached(y: torch.Tensor, w: World, cache: dict[str, Any] | None = None) -> torch.Tensor:
    """Append to a cache, the world's or an argument, and read all of it."""
    held = w.cache if cache is None else cache
    held.setdefault("keys", []).append(y @ w.w)
    return sum(held["keys"][-2:]) * len(held["keys"])  # type: ignore[return-value]


def _heads(y: torch.Tensor, w: World) -> torch.Tensor:
    q, k, v = (each.reshape(1, 2, -1, 3).contiguous() for each in (y, y.sin(), y @ w.w))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(y.shape)


def _inner_gradient(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y.detach().requires_grad_()
    (g,) = torch.autograd.grad((z @ w.w.detach()).sin().sum(), z)
    return y + g


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y,) = ctx.saved_tensors
        return 2 * y * grads[0]


def _rotated(y: torch.Tensor, w: World) -> torch.Tensor:
    left, right = y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]
    return torch.cat([-right, left], -1) * w.scale + y


def _residual(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y + w.linear(y)
    return z + (w.norms[0](z) @ w.w).relu_() - z.mean(-1, keepdim=True)


def _attended(y: torch.Tensor, w: World) -> torch.Tensor:
    """Attention in separate operators, with a mask."""
    t = y.double()[None]
    mask = torch.ones(y.shape[0], y.shape[0], dtype=torch.bool).tril()
    made = F.scaled_dot_product_attention(t.sin(), t.cos(), t, attn_mask=mask, dropout_p=0.1)
    return made[0].float()


def _written_product(y: torch.Tensor, w: World) -> torch.Tensor:
    """A product that is resized and written to."""
    made = y @ w.w
    grown = made.repeat(2, 1).cos()
    made.mul_(0.5)
    return grown[: y.shape[0]] * made


Step = Callable[[torch.Tensor, World], torch.Tensor]
STEPS: tuple[Step, ...] = (
    _into_row,
    _through_view,
    _masked,
    _reshaped,
    _strided,
    _hooked,
    _heads,
    _inner_gradient,
    lambda y, w: _Square.apply(y),
    lambda y, w: y @ w.w,
    lambda y, w: y @ w.w.t(),
    lambda y, w: w.linear(y),
    lambda y, w: F.silu(w.linear(y)) * y,
    lambda y, w: w.norms[0](y),
    lambda y, w: F.gelu(w.norms[1](y)),
    lambda y, w: w.norms[2](y.view(y.shape[0], y.shape[1], 1)).view(y.shape),
    lambda y, w: w.conv(y.unsqueeze(0)).squeeze(0),
    lambda y, w: w.batch(y),
    lambda y, w: w.table(_rows(y, w)) * y,
    lambda y, w: y * w.scale,
    lambda y, w: y * w.found,
    lambda y, w: (y @ w.found.t()).cos(),
    lambda y, w: y.sin() * y,
    lambda y, w: (y @ w.w).relu_(),
    lambda y, w: F.leaky_relu(y, 0.2) / 1.5,
    lambda y, w: F.dropout(y, 0.3),
    lambda y, w: F.dropout(y * 1.0, 0.3, inplace=True),
    lambda y, w: y.t(),
    lambda y, w: torch.cat([y[2:], y[:2].sin()]),
    lambda y, w: torch.cat(F.glu(torch.cat([y, y.cos()], -1), -1).chunk(2, -1), -1),
    lambda y, w: y.tanh().exp(),
    lambda y, w: y.softmax(-1),
    lambda y, w: F.softplus(y).sqrt(),
    lambda y, w: y.pow(2) * 0.1,
    lambda y, w: sp.checkpoint_name(y @ w.w, "n"),
    lambda y, w: y + y.mean(0, keepdim=True).expand_as(y),
    lambda y, w: torch.stack(y.unbind(0)[::-1]),
    lambda y, w: torch.where(y > 0, y, y.abs().sin()),
    _rotated,
    _residual,
    lambda y, w: (y + y.sin()).sigmoid() - y,
    lambda y, w: (y * 0.5).log_softmax(0) @ w.w,
    lambda y, w: (y @ w.w).t().contiguous().t() + y,
    lambda y, w: (y.t().clone() * 2.0).t().cos(),
    lambda y, w: (y - y.max(-1, keepdim=True)[0]).exp(),
    lambda y, w: (y.topk(y.shape[1])[0] + y).cos(),
    lambda y, w: (y[_rows(y, w).flip(0)] + y).sin(),
    lambda y, w: (1.0 + y.tanh()) * y,
    lambda y, w: (2.0 - y.sin()).cos(),
    lambda y, w: (y.cos() + w.found[: y.shape[0], : y.shape[1]].mean()).sin(),
    lambda y, w: (y.sin() + w.found.sum(0)[: y.shape[1]]).softmax(-1),
    lambda y, w: y.cos().masked_fill(y.detach() > 0.4, -0.5).sin(),
    lambda y, w: torch.where(y.detach() > 0, y.sin(), 0.25).exp(),
    lambda y, w: F.pad(y.sin(), (1, 1), value=0.5).cos()[:, 1:-1],
    lambda y, w: torch.cat([y.cos(), torch.zeros(1, y.shape[1])]).exp()[:-1],
    lambda y, w: torch.stack([y.cos(), torch.ones_like(y)]).sin()[0],
    lambda y, w: F.linear(y, w.w, w.w[0].detach()).sin() * y,
    lambda y, w: torch.zeros_like(y) * y + y.clamp(-0.5, 0.5).sin(),
    _attended,
    _written_product,
    lambda y, w: (y.double() * w.scale).float().sin(),
    lambda y, w: (y.cumsum(0) / 3.0 + y).tanh(),
    lambda y, w: torch.baddbmm(y[None], y[None], w.w[None])[0],
)


def _add_unseen(t: torch.Tensor) -> None:
    t.data.add_(0.25)


def _negate_unseen(t: torch.Tensor) -> None:
    t.data.neg_()


def new_data(t: torch.Tensor) -> None:
    """Give a tensor other memory, which its version does not show."""
    t.data = t.data * 0.5


def _in_place(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.mul_(0.5)


def _copied(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.copy_(torch.ones_like(t))


def optimizer_step(t: torch.Tensor) -> None:
    """Change a leaf as an optimizer does."""
    t.grad = torch.ones_like(t)
    torch.optim.SGD([t], lr=0.1).step()
    t.grad = None


def _swap(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.set_(t.detach().clone() * 2)


CHANGES = (_add_unseen, _negate_unseen, new_data, _in_place, _copied, optimizer_step, _swap)
