"""The recipe engine: equal gradients, fewer bytes, the traps of saved-tensor hooks."""

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
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
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
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    solve,
)
from sac_policies import profile as prof
from sac_policies.engines.recipe._region import refusal


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
        (save_by_bytes(at_least=1), "decides single calls of aten.mm.default"),
        (save_named("x"), "reads names of tensors"),
        (save_modules("attn"), "decides single calls of aten.mm.default"),
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
