"""Bytes in a report are those the allocator gave between forward and backward, on each engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import (
    ATTENTION,
    MATMULS,
    EngineError,
    checkpoint,
    name,
    profile,
    recompute_all,
    recompute_ops,
    report,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_named,
    save_ops,
    solve,
)
from sac_policies.budget._measure import _changes

CPU = torch.device("cpu")


class _Conv(nn.Module):
    """Convolution, batch norm, pooling; x is (2, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x)) + 1.0), 2).flatten(1)


class _Gated(nn.Module):
    """A norm written by hand, a gate, a value that is dropped; x is (6, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        gate, value = self.up(y).chunk(2, dim=-1)
        (gate @ value.t()).sin()  # nobody reads it: autograd lets it go
        return x + self.down(F.silu(gate) * name(value.clone(), "value"))


def _models(make_block):
    torch.manual_seed(0)
    return {
        "block": (make_block(), torch.randn(2, 4, 16)),
        "dropout": (make_block(0.2), torch.randn(2, 4, 16, requires_grad=True)),
        "conv": (_Conv(), torch.randn(2, 3, 8, 8)),
        "gated": (_Gated(), torch.randn(6, 16, requires_grad=True)),
        "inplace": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), torch.randn(3, 8)),
        "table": (nn.Sequential(nn.Embedding(5, 8), nn.GELU()), torch.tensor([[1, 4, 1]])),
    }


def _measured(function, x, policy, engine):
    """Bytes that a forward allocates and does not release while only its graph lives."""
    alive = []

    def step():
        out = checkpoint(function, x, policy=policy, engine=engine, preserve_rng_state=False)
        alive.append(out.grad_fn)

    step()  # what is made once and stays is not the region's
    alive.clear()
    changes = _changes(step)
    return sum(change for _, change in changes)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("engine", ["recipe", "contexts"])
@pytest.mark.parametrize("kind", ["block", "dropout", "conv", "gated", "inplace", "table"])
@pytest.mark.parametrize(
    "policy",
    [
        save_ops(MATMULS, ATTENTION),
        save_all(),
        recompute_all(),
        recompute_ops("aten.mm", "aten.silu") | save_ops("aten.addmm"),
    ],
    ids=["products", "all", "nothing", "some"],
)
def test_held_bytes_are_those_of_the_allocator(make_block, kind, engine, policy):
    """Exactly, and by call."""
    model, x = _models(make_block)[kind]
    result = report(model, x, policy=policy, engine=engine)
    assert result.engine == engine
    assert result.held_bytes == sum(row.held_bytes for row in result.rows)
    assert result.held_bytes + result.guard_bytes == _measured(model, x, policy, engine)


@pytest.mark.parametrize("kind", ["block", "conv", "gated"])
@pytest.mark.parametrize("engine", ["recipe", "contexts"])
@pytest.mark.parametrize("share", ["100%", "50%"])
def test_plan_holds_what_it_promises(make_block, kind, engine, share):
    """Promise of the solver, report, and allocator agree to the byte."""
    model, x = _models(make_block)[kind]
    plan = solve(profile(model, x), share, engine=engine)
    plan = plan or solve(profile(model, x), plan.smallest_bytes, engine=engine)
    result = report(model, x, policy=plan)
    assert result.engine == plan.engine == engine
    assert result.held_bytes + result.guard_bytes == _measured(model, x, plan, "auto")
    # What autograd saves for the result that `_Gated` drops is planned for, and then let go.
    dropped = 6 * 6 * 4 if (kind, engine) == ("gated", "recipe") else 0
    assert result.held_bytes == plan.kept_bytes - dropped


def test_values_of_other_policies_are_counted(make_block):
    """Counted calls and sizes go to the contexts engine, names do not."""
    model, x = _models(make_block)["gated"]
    for policy in (
        save_every_nth("aten.mul", n=2),
        save_named("value"),
        save_by_bytes(at_least=1000),
    ):
        result = report(model, x, policy=policy)
        assert result.engine == ("recipe" if policy.reads_names else "contexts")
        assert result.held_bytes + result.guard_bytes == _measured(model, x, policy, "auto")
        assert result.held_bytes > 0


def test_what_recipes_keep_against_the_policy_is_listed():
    """A sum forgets a number that was added; the row says so, and the text does."""
    x = torch.randn(3, 4, requires_grad=True)

    def body(t):
        return ((t + 1).sin() + 1).cos()

    policy = recompute_ops("aten.sin")
    result = report(body, x, policy=policy)
    assert (result.engine, result.why) == ("recipe", "it can follow the policy, and costs least")
    assert [(row.op, row.index, row.held_bytes) for row in result.kept_anyway] == [
        ("aten.add.Tensor", 0, 48),
        ("aten.add.Tensor", 1, 48),
    ]
    why = "AddBackward0 reads something that needs no gradient and was not saved"
    assert result.kept_anyway[0].why == why
    assert f"KEPT: {why}" in str(result)
    assert "96 bytes held by the recipe engine" in str(result)
    assert "auto takes the recipe engine: it can follow the policy" in str(result)
    assert report(body, x, policy=policy, engine="contexts").kept_anyway == ()
    assert report(body, x, policy=policy, engine="contexts").held_bytes == 0


@pytest.mark.parametrize(
    ("policy", "options", "why"),
    [
        (save_every_nth("aten.mm", n=2), {}, r"the policy decides single calls of aten\.mm"),
        (save_ops("aten.mm"), {"debug": True}, "debug=True compares operators"),
        (solve(profile(torch.sin, torch.ones(2)), 1.0), {}, "other inputs needed gradients"),
    ],
    ids=["counted", "debug", "plan"],
)
def test_report_says_why_auto_takes_contexts(policy, options, why):
    """The reason is that of `checkpoint`."""
    x = torch.randn(3, 3, requires_grad=True)
    result = report(lambda t: (t @ t).sin(), x, policy=policy, **options)
    assert result.engine == "contexts"
    assert why.replace("\\", "") in result.why


class Doubled(torch.autograd.Function):
    """An operator of which no rule is known, for it counts its forwards."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        """Twice x."""
        Doubled.runs += 1
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        """Twice grad."""
        return grad * 2


def block(t):
    """Saves a value that nothing rebuilds, and one that is."""
    return Doubled.apply(t).sin().cos()


def test_auto_learns_where_much_has_no_recipe():
    """The first forward shows it; later ones run under contexts, and the report says why."""

    def body(t):
        return block(t)

    x = torch.randn(64, 128, requires_grad=True)
    policy = recompute_all()
    assert report(body, x, policy=policy).engine == "recipe"
    grads = []
    for _ in range(3):
        out = checkpoint(body, x, policy=policy)
        grads += torch.autograd.grad(out.sum(), x)
    result = report(body, x, policy=policy)
    assert result.engine == "contexts"
    assert "no rule rebuilds much of what an earlier forward" in result.why
    assert result.held_bytes == 0
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    assert all(torch.equal(grad, plain) for grad in grads)
    assert report(body, x, policy=policy, engine="recipe").held_bytes == 64 * 128 * 4


@pytest.mark.parametrize("small", [True, False])
def test_auto_stays_where_little_has_none(small):
    """A few bytes, or a small share of them."""
    rows = 2 if small else 512

    def body(t):
        y = Doubled.apply(t[:rows] if small else t[:64]).sin().sum()
        for _ in range(0 if small else 8):
            t = t.exp().sin()
        return y + t.sum()

    x = torch.randn(rows, 128, requires_grad=True)
    for _ in range(2):
        checkpoint(body, x, policy=recompute_all()).backward()
    assert report(body, x, policy=recompute_all()).engine == "recipe"


def test_inside_others_hooks_an_engine_is_not_changed():
    """A checkpoint around runs the region again, and has to find in it what it found before."""

    def body(t):
        return block(t)

    x = torch.randn(64, 128, requires_grad=True)
    outer = torch_checkpoint(
        lambda t: checkpoint(body, t, policy=recompute_all()).sum(), x, use_reentrant=False
    )
    checkpoint(body, x, policy=recompute_all())  # between forward and backward: it learns
    (grad,) = torch.autograd.grad(outer, x)
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(grad, plain)


def test_named_engine_needs_no_reason():
    """The caller knows why."""
    x = torch.randn(3, 3, requires_grad=True)
    assert report(torch.sin, x, policy=save_ops("aten.sin"), engine="recipe").why == ""


def test_report_takes_options_of_checkpoint():
    """They are torch's and not the function's."""
    x = torch.randn(3, 3, requires_grad=True)
    assert report(torch.sin, x, policy=save_all(), preserve_rng_state=False).rows


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("tags", {}, "engine 'tags' is for compiled code"),
        ("fast", {}, "report: engine 'fast' is unknown, but"),
        ("auto", {"use_reentrant": True}, "report: use_reentrant True"),
        ("recipe", {}, r"report: policy EveryNth\(.* decides single calls"),
    ],
)
def test_report_refuses_what_checkpoint_refuses(engine, options, said):
    """By its own name."""
    with pytest.raises(EngineError, match=said):
        report(
            torch.sin,
            torch.ones(2),
            policy=save_every_nth("aten.mm", n=2),
            engine=engine,
            **options,
        )
