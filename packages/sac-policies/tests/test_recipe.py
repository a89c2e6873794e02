"""The recipe engine: equal gradients, fewer bytes, policies it refuses."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from sac_policies import (
    ATTENTION,
    MATMULS,
    EngineError,
    Policy,
    UnmatchedEntryWarning,
    checkpoint,
    first_match,
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_ops,
    scoped,
    solve,
)
from sac_policies import profile as prof
from sac_policies.engines.recipe._run import refusal


class Gpt2(nn.Module):
    """Learned biases, GELU, dropout on request. (batch, seq, model) in and out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).split(d, dim=2)
        q, k, v = (each.view(b, t, 2, d // 2).transpose(1, 2) for each in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.o(a.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class Llama(nn.Module):
    """Eager RMSNorm, rotary embedding, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(16, 40, bias=False), nn.Linear(16, 40, bias=False)
        self.down = nn.Linear(40, 16, bias=False)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(x.shape[-1] // 2)
        left, right = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.norm(x)
        q, k, v = (p(y).view(b, t, 2, d // 2).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Conv(nn.Module):
    """Convolutions with batch norm, channels last inside."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1).contiguous(memory_format=torch.channels_last)
        x = F.silu(self.b1(self.c1(x)))
        return F.relu_(self.b2(self.c2(x))).mean((2, 3))


class Experts(nn.Module):
    """Each token goes to the two experts of three that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 16)
        weight, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, rank = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(tokens[row]) * weight[row, rank, None])
        return out


class Cube(torch.autograd.Function):
    """x ** 3, saving input and output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x * x * x
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, out = ctx.saved_tensors
        return grads[0] * (2 * x * x + out / x)


class Custom(nn.Module):
    """A custom function between operators that replay."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(Cube.apply(F.gelu(self.up(x)) + 2)))


class Frozen(nn.Module):
    """A frozen product with a trained low-rank one beside it, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        y += self.up(self.down(x)) * 0.5
        return F.gelu(y, approximate="tanh").sin()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": Gpt2,
    "gpt2 with dropout": lambda: Gpt2(0.1),
    "llama": Llama,
    "convolution and batch norm": Conv,
    "experts": Experts,
    "custom function": Custom,
    "frozen and low rank": Frozen,
}

POLICIES = {
    "matmuls": save_ops(MATMULS, ATTENTION),
    "nothing": recompute_all(),
    "all": save_all(),
}


def step(model: nn.Module, x: torch.Tensor, call: Callable[..., Any]) -> list[torch.Tensor]:
    """One forward and backward from a fixed seed; gradients, then the state of the generator."""
    model.zero_grad()
    x.grad = None
    torch.manual_seed(1)
    call(model, x).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    return [*grads, x.grad, torch.get_rng_state()]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """Each model, from one seed."""
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.fixture
def x() -> torch.Tensor:
    """(batch, seq, model) = (2, 6, 16)."""
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)


def under(policy: Policy) -> Callable[..., Any]:
    """A caller that checkpoints with `policy`."""
    return lambda model, x: checkpoint(model, x, policy=policy, engine="recipe")


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_gradients_are_bitwise_equal(model: nn.Module, x: torch.Tensor, policy: Policy) -> None:
    """Every model's gradients, and the random state after it, are those of no checkpointing."""
    plain = step(model, x, lambda m, t: m(t))
    ours = step(model, x, under(policy))
    assert all(map(torch.equal, plain, ours))


def test_buffers_are_updated_once(x: torch.Tensor) -> None:
    """Batch norm sees one forward, not two."""
    model = Conv()
    step(model, x, under(recompute_all()))
    assert model.b1.num_batches_tracked.item() == 1


@pytest.mark.parametrize("inner_first", [True, False])
def test_torch_checkpoint_nests_either_way(x: torch.Tensor, inner_first: bool) -> None:
    """A region of torch's inside ours, and ours inside torch's."""
    torch.manual_seed(0)
    model = Gpt2()
    ours = under(save_ops(MATMULS))

    def theirs(m: nn.Module, t: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(m, t, use_reentrant=False)

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return (theirs if inner_first else ours)(self.inner, t * 2).sin()

    nested = Nested()
    found = step(nested, x, ours if inner_first else theirs)
    plain = step(model, x, lambda m, t: m(t * 2).sin())
    assert all(map(torch.equal, found, plain))


def test_product_of_an_inner_checkpoint_is_kept(x: torch.Tensor) -> None:
    """Its node may be unpacked once only, and that is for its own backward."""
    w = torch.eye(16).add(0.1).requires_grad_()

    def function(t: torch.Tensor) -> torch.Tensor:
        inner = torch_checkpoint(lambda u: u @ w, t.sin(), use_reentrant=False)
        return inner.sin()

    out = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    found = torch.autograd.grad(out.sum(), [x, w])
    expected = torch.autograd.grad(((x.sin() @ w).sin()).sum(), [x, w])
    assert all(map(torch.equal, found, expected))


def test_nothing_is_hooked_without_gradients() -> None:
    """Under no_grad the function simply runs."""
    with torch.no_grad():
        out = checkpoint(torch.sin, torch.ones(2), policy=recompute_all(), engine="recipe")
    assert not out.requires_grad


def test_autocast_forward_is_equal(x: torch.Tensor) -> None:
    """Under autocast gradients are bitwise those of no checkpointing."""
    torch.manual_seed(0)
    model = Gpt2()

    def cast(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(m: nn.Module, t: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(m, t)

        return run

    plain = step(model, x, cast(lambda m, t: m(t)))
    assert all(map(torch.equal, plain, step(model, x, cast(under(recompute_all())))))


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (save_every_nth("aten.mm", n=2), "decides single calls of aten.mm.default"),
        (save_by_bytes(at_least=1), "decides single calls of every operator"),
        (scoped(save_every_nth("aten.mm", n=2), "attn"), "decides single calls of aten.mm"),
        (
            first_match(scoped(save_ops("aten.mm"), "attn"), save_every_nth("aten.mm", n=2)),
            "decides single calls of aten.mm",
        ),
        (offload("aten.mm"), "offloads, but saved-tensor hooks only keep or replay"),
    ],
)
def test_refused_policy_says_why(policy: Policy, reason: str) -> None:
    """What the engine cannot follow it refuses, and "auto" takes another engine."""
    x = torch.ones(2, 2, requires_grad=True)
    assert refusal(policy).startswith(reason)
    with pytest.raises(EngineError, match=r'policy .* Use engine="contexts"'):
        checkpoint(torch.mm, x, x, policy=policy, engine="recipe")


def test_entry_that_matches_nothing_warns_once() -> None:
    """The first forward under a policy looks for entries without an operator."""
    policy = save_ops("aten.mm", "aten.bmm")
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.warns(UnmatchedEntryWarning, match="'aten.bmm'"):
        checkpoint(torch.mm, x, x, policy=policy, engine="recipe")
    checkpoint(torch.mm, x, x, policy=policy, engine="recipe")


def held_after(function: Callable[..., Any], *args: Any) -> int:
    """Bytes that the allocator holds for a call's result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        out = function(*args)
    del out
    return sum(event.self_cpu_memory_usage for event in found.key_averages())


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("gpt2", [True, False])
def test_engine_keeps_no_more_than_torch_under_the_same_policy(
    make_block: Callable[..., nn.Module], gpt2: bool
) -> None:
    """Outputs that no backward reads are not kept, so less is."""
    model = Gpt2() if gpt2 else make_block()
    x = torch.randn(8, 64, 16, requires_grad=True)
    ops = [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    contexts = functools.partial(create_selective_checkpoint_contexts, ops)
    theirs = functools.partial(
        torch_checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    ours = under(save_ops(*ops))
    ours(model, x)
    assert held_after(ours, model, x) < held_after(theirs, model, x)


def test_policies_are_not_kept_alive() -> None:
    """Following a plan leaves no reference to it behind."""
    x = torch.ones(4, 4, requires_grad=True)
    plan = solve(prof(torch.sin, x), 1.0)
    checkpoint(torch.sin, x, policy=plan, engine="recipe").sum().backward()
    alive = weakref.ref(plan)
    del plan
    gc.collect()
    assert alive() is None
