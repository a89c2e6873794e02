"""Spans of code: named in policies, and run again for what nothing else rebuilds."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchparts_conformance import requirement

SIZE = 128


class Made(TorchDispatchMode):
    """Notes the operators that run, and every storage of a matrix that is made."""

    def __init__(self):
        super().__init__()
        self.storages, self.ops = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        given = {id(each.untyped_storage()) for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and id(out.untyped_storage()) not in given:
            self.storages.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self):
        """How many matrices somebody has."""
        found = {id(each): each for each in (ref() for ref in self.storages) if each is not None}
        return sum(each.nbytes() >= SIZE * SIZE * 4 for each in found.values())


class Own(torch.autograd.Function):
    """An operator of which no rule knows."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        """Save the input."""
        Own.runs += 1
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        """By the saved input."""
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Block(nn.Module):
    """A span around modules, another inside of it."""

    def __init__(self, span):
        super().__init__()
        self.span = span
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        """(rows, 16) in and out."""
        return self.span(self.feed, "ffn")(x).sin()

    def feed(self, x):
        """What the outer span runs."""
        return self.down(self.span(F.gelu, "act")(self.up(x)))


@requirement(
    "SP-190",
    level="MUST",
    text=(
        "Policies that read paths of modules MUST find spans by their label, with the modules "
        "called in them: the recipe and the contexts engine MUST keep and run again the same "
        "operators, and a span outside of a region MUST be a plain call."
    ),
    rationale=(
        "a part of a model is not always a module, and whoever marks one must not have to "
        "choose the engine first"
    ),
    since="0.1.0",
    profile="recipe",
)
@pytest.mark.parametrize("engine", ["recipe", "contexts"])
@pytest.mark.parametrize("named", ["act", "ffn", "products", "nothing"])
def test_policies_name_spans(part, device, engine, named):
    """The inner one, the outer one with its modules, one operator of the outer."""
    torch.manual_seed(0)
    block = Block(part.span).to(device)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    policy, again = {
        "act": (part.save_modules("act"), {"addmm"}),
        "ffn": (part.save_modules("ffn"), set()),
        "products": (part.scoped(part.save_ops("aten.addmm"), "ffn"), {"gelu"}),
        "nothing": (part.recompute_all(), {"gelu", "addmm"}),
    }[named]
    wanted = torch.autograd.grad(block(x).sum(), x)
    for _ in range(2):
        out = part.checkpoint(block, x, policy=policy, engine=engine)
        with Made() as made:
            found = torch.autograd.grad(out.sum(), x)
        assert torch.equal(*wanted, *found)
        ran = {op for op in ("gelu", "addmm") if f"aten.{op}.default" in made.ops}
        assert ran == again


@requirement(
    "SP-191",
    level="MUST",
    text=(
        "What the recipe engine recomputes in a span and no rule rebuilds MUST be made by "
        "running the span's code again from its inputs: it MUST NOT be held, the code MUST run "
        "again at most once in a backward and draw the random numbers of the forward, and "
        "gradients and what is drawn afterwards MUST be those of no checkpointing, bitwise."
    ),
    rationale="operators of one's own have no rule",
    since="0.1.0",
    profile="recipe",
)
@pytest.mark.parametrize("kind", ["alone", "twice", "dropout", "several", "edges"])
def test_code_of_a_span_makes_its_values_again(part, device, kind):
    """Nothing of it is alive between forward and backward but the output."""
    x = torch.linspace(-1.3, 1.7, SIZE * SIZE, device=device).reshape(SIZE, SIZE).requires_grad_()
    w = torch.linspace(-0.2, 0.1, SIZE * SIZE, device=device).reshape(SIZE, SIZE).requires_grad_()

    def several(t):
        left, right = Own.apply(t).chunk(2, -1)
        return {"left": left, "right": [right, t.sin()]}

    def joined(t):
        parts = part.span(several, "s")(t)
        return torch.cat([parts["left"], parts["right"][0]], -1) * parts["right"][1]

    function, runs = {
        "alone": (part.span(Own.apply, "s"), 1),
        "twice": (part.span(lambda t: Own.apply(Own.apply(t).sin()), "s"), 2),
        "dropout": (part.span(lambda t: F.dropout(Own.apply(t), 0.3), "s"), 1),
        "several": (joined, 1),
        "edges": (lambda t: (part.span(Own.apply, "s")(t) + t).sin().cos(), 1),
    }[kind]

    def region(x, w):
        return function(x @ w) @ w

    def step(forward):
        torch.manual_seed(5)
        out = forward()
        Own.runs = 0
        return [*torch.autograd.grad(out.sum(), (x, w)), torch.rand(3, device=device)]

    wanted = step(lambda: region(x, w))

    def run():
        return part.checkpoint(region, x, w, policy=part.recompute_all(), engine="recipe")

    for _ in range(2):
        assert all(map(torch.equal, wanted, step(run)))
        assert Own.runs == runs
    with Made() as made:
        out = run()
    gc.collect()
    assert made.alive() == 1
    del out


@requirement(
    "SP-192",
    level="MUST",
    text=(
        "The code of a span that runs again MUST leave what it writes to as one run of it does,"
        " and where what it reads has changed since the forward, gradients MUST be those of no "
        "checkpointing or MutationError MUST be raised."
    ),
    rationale="running statistics that are counted twice make another model",
    since="0.1.0",
    profile="recipe",
)
def test_code_of_a_span_writes_once(part, device):
    """Running statistics after a step are those of no checkpointing."""
    x = torch.randn(SIZE, SIZE, device=device, requires_grad=True)
    found = []
    for engine in (None, "recipe"):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(SIZE).to(device)
        act = part.span(lambda t, norm=norm: Own.apply(norm(t)), "act")

        def region(t, act=act):
            return act(t * 2.0).sin()

        if engine is None:
            out = region(x)
        else:
            out = part.checkpoint(region, x, policy=part.recompute_all(), engine=engine)
        (grad,) = torch.autograd.grad(out.sum(), x)
        found.append([grad, norm.running_mean, norm.running_var, norm.num_batches_tracked])
    assert all(map(torch.equal, *found))


@requirement("SP-192")
@pytest.mark.parametrize("what", ["input", "read"])
def test_changes_are_seen(part, device, what):
    """Of what a span is given, and of what its code finds; also past version counters."""
    x = torch.randn(SIZE, SIZE, device=device, requires_grad=True)
    scale = torch.ones(SIZE, device=device, requires_grad=True)
    changed = {"input": x, "read": scale}[what]

    def region(t):
        return part.span(lambda t: Own.apply(t * scale), "act")(t).sin()

    unchanged = torch.autograd.grad(region(x).sum(), (x, scale))
    plain = region(x)
    out = part.checkpoint(region, x, policy=part.recompute_all(), engine="recipe")
    changed.data.mul_(2)
    try:
        found = torch.autograd.grad(out.sum(), (x, scale))
    except part.MutationError:
        return
    changed_too = torch.autograd.grad(plain.sum(), (x, scale))
    assert any(all(map(torch.equal, each, found)) for each in (unchanged, changed_too))
