"""Changes between a region's forward and backward, and changes by recomputation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchparts_conformance import requirement

aten = torch.ops.aten


def leaf(device, *shape):
    """Return different values of one shape, with requires_grad."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel, device=device).reshape(shape).requires_grad_()


def add_unseen(tensor):
    """Add in place without a new version number."""
    tensor.data.add_(0.5)


def replace_data(tensor):
    """Assign other data to the tensor."""
    tensor.data = tensor.data * 2


class Fresh(nn.Module):
    """Wrap a function in a new object, so that its next region is a first step."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        """Call it."""
        return self.function(*args)


@requirement(
    "SP-133",
    "A hook that a region registers on a tensor from outside MUST be registered once and run once"
    " in backward.",
    rationale="recomputation registers it again: 1.880 became 2.820 on 2.13",
)
def test_hook_on_an_input_runs_once(part, device):
    """The region registers hooks on an activation and on a parameter."""
    results = []
    for checkpointed in (False, True):
        x, w = leaf(device, 4, 4), leaf(device, 4, 4)

        def function(t, w=w):
            t.register_hook(lambda grad: grad * 1.5)
            w.register_hook(lambda grad: grad * 2)
            return (t @ w).sin().exp()

        t = x * 1.0
        out = (
            part.checkpoint(function, t, policy=[aten.mm.default]) if checkpointed else function(t)
        )
        out.sum().backward()
        assert len(w._backward_hooks) == 1
        results.append([x.grad, w.grad])
    assert all(map(torch.equal, *results))


class Cache:
    """A list that grows, a counter, and a buffer that is written in place."""

    def __init__(self, device):
        self.keys = []
        self.count = 0
        self.buffer = torch.zeros(8, 4, device=device)


def grow(t, w, cache):
    """Append to a list."""
    cache.keys.append(t @ w)
    cache.count += 1
    return torch.cat(cache.keys).sin() * cache.count


def write(t, w, cache):
    """Write to a buffer."""
    cache.buffer[cache.count : cache.count + 4] = t @ w
    cache.count += 4
    return cache.buffer.sin().exp()


@requirement(
    "SP-134",
    "If a region changes a container or object among its arguments, by appending or by writing to"
    " its tensors, recomputation MUST see it unchanged and MUST NOT change it.",
    rationale=(
        "key and value caches: recomputation runs other operators, or gradients are silently "
        "wrong; shihao1895/MemoryVLA#18"
    ),
)
@pytest.mark.parametrize("function", [grow, write])
def test_cache_among_the_arguments(part, device, function):
    """Gradients are those without checkpointing, and the cache is as forward left it."""
    results = []
    for checkpointed in (False, True):
        x, w, cache = leaf(device, 4, 4), leaf(device, 4, 4), Cache(device)
        if checkpointed:
            out = part.checkpoint(function, x, w, cache, policy=lambda *call, **kwargs: False)
        else:
            out = function(x, w, cache)
        content = [len(cache.keys), cache.count, cache.buffer.detach().clone()]
        results.append(torch.autograd.grad(out.sum(), [x, w]))
        assert [len(cache.keys), cache.count] == content[:2]
        assert torch.equal(cache.buffer.detach(), content[2])
    assert all(map(torch.equal, *results))


@requirement(
    "SP-135",
    "In-place operators that change sizes or strides (`unsqueeze_`, `t_`, `as_strided_`) MUST "
    "give the gradients of no checkpointing, saved or not.",
    rationale="restoring a saved value by a copy raised 'output with shape ... does not match'",
)
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.unsqueeze_(0),
        lambda y: y.unsqueeze_(1).squeeze_(1),
        lambda y: y.t_(),
        lambda y: y.transpose_(0, 1),
        lambda y: y.as_strided_((3, 2), (1, 3)),
    ],
)
def test_in_place_operator_changes_the_shape(part, device, saves, change):
    """A product changes its shape in place, with everything saved and with nothing saved."""

    def function(t, w):
        y = t @ w
        change(y)
        return y.sin() * 2

    def policy(ctx, op, *args, **kwargs):
        return saves

    x, w = leaf(device, 4, 4), leaf(device, 4, 4)
    out = part.checkpoint(function, x, w, policy=policy)
    found = torch.autograd.grad(out.square().sum(), [x, w])
    assert all(map(torch.equal, found, torch.autograd.grad(function(x, w).square().sum(), [x, w])))


def nothing(ctx, op, *args, **kwargs):
    """A policy that saves nothing: every operator is recomputed."""
    return False


PRODUCTS = [aten.addmm.default, aten.mm.default]


def write_in_place(tensor):
    """Write with a new version number: plain autograd raises for saved tensors."""
    with torch.no_grad():
        tensor.mul_(2)


@requirement(
    "SP-159",
    "If a weight or input of a region is changed after its forward (in place, without a new "
    "version number, or by assigning other data), gradients MUST be those without checkpointing, "
    "with or without the change, or an error MUST be raised, also if the operators that read it "
    "are saved.",
    rationale=(
        "a saved product saves its weight as a view, which sees data assigned later: gradients "
        "were silently wrong by 0.6; torch 2.13 silently gives other gradients"
    ),
)
@pytest.mark.parametrize("change", [add_unseen, replace_data, write_in_place])
@pytest.mark.parametrize("at", range(3), ids=["weight", "given", "found"])
@pytest.mark.parametrize("policy", [nothing, PRODUCTS], ids=["nothing", "products"])
@pytest.mark.parametrize("nested", [False, True])
def test_inputs_of_a_region_are_changed_after_forward(part, device, nested, policy, at, change):
    """Operators are recomputed or saved; gradients ignore the change or are plain autograd's.

    Autograd reads the changed value if it saved the tensor itself, and the old value if it saved a
    view of other data. A mixture of both is wrong.
    """
    allowed = []
    for checkpointed, changed in [(False, False), (False, True), (True, True)]:
        layer, x = nn.Linear(6, 6).to(device), leaf(device, 4, 6)
        with torch.no_grad():
            layer.weight.copy_(leaf(device, 6, 6).cos())
            layer.bias.copy_(leaf(device, 6))
        given, held = x * 1.5, leaf(device, 6, 6).sin() * x.mean()

        def function(t, layer=layer, held=held):
            return (layer(t.exp()).sin() @ held.t().tanh() + layer(t)) @ held

        def region(t, function=function):
            return part.checkpoint(Fresh(function), t, policy=policy)

        def around(t, region=region):
            return part.checkpoint(Fresh(lambda u: region(u).sin()), t, policy=policy)

        if checkpointed:
            out = around(given) if nested else region(given)
        else:
            out = function(given).sin() if nested else function(given)
        if changed:
            change((layer.weight, given, held)[at])
        try:
            grads = torch.autograd.grad(out.sum(), [x, layer.weight, layer.bias])
        except RuntimeError:
            if checkpointed:
                return
            continue
        if not checkpointed:
            allowed.append(grads)
    assert any(all(map(torch.equal, grads, each)) for each in allowed)


@requirement(
    "SP-141",
    "If a region computes a gradient inside, the rest of the region MUST run as without "
    "checkpointing, with and without early stop.",
    rationale=(
        "the inner backward recomputes the region beyond the point that forward has reached; on "
        "torch 2.13 a cache has grown before forward reads it, which changes the loss"
    ),
)
@pytest.mark.parametrize("function", [grow, write])
@pytest.mark.parametrize("early_stop", [True, False])
def test_gradient_inside_a_region(part, device, function, early_stop):
    """A cache and running statistics after the gradient are as without checkpointing."""
    results = []
    for checkpointed in (False, True):
        x, w, cache = leaf(device, 4, 4), leaf(device, 4, 4), Cache(device)
        norm = nn.BatchNorm1d(4).to(device)

        def body(t, w, cache, norm=norm):
            z = (t @ w).sin()
            (inner,) = torch.autograd.grad(z.sum(), t, retain_graph=True)
            return norm(function(z * inner, w, cache)).exp()

        if checkpointed:
            out = part.checkpoint(
                body,
                x * 1.0,
                w,
                cache,
                policy=nothing,
                early_stop=early_stop,
            )
        else:
            out = body(x * 1.0, w, cache)
        seen = [out.detach(), norm.running_mean.clone(), norm.num_batches_tracked.clone()]
        results.append([*seen, *torch.autograd.grad(out.square().sum(), [x, w])])
    assert all(map(torch.equal, *results))


class Mode:
    """A sentinel: users compare it with `is`."""


HALF = Mode()


@requirement(
    "SP-220",
    "An argument that nothing changes MUST be the same object in recomputation as in forward, "
    "whether it is positional, by keyword or in a container.",
    rationale=(
        "sentinels and modes are compared with `is`; with a copy recomputation takes the other "
        "branch, and gradients are silently wrong"
    ),
)
def test_an_argument_compared_by_identity_stays_the_same_object(part, device):
    """Forward and recomputation see the sentinel that was passed."""
    seen = []

    def function(t, mode=None, nested=None):
        seen.append((mode if nested is None else nested["mode"][0]) is HALF)
        return F.silu(t * (0.5 if seen[-1] else 2.0)).sin()

    x = leaf(device, 2, 4)
    for args, kwargs in (((HALF,), {}), ((), {"mode": HALF}), ((), {"nested": {"mode": [HALF]}})):
        expected = torch.autograd.grad(function(x, *args, **kwargs).sum(), x)
        seen.clear()
        out = part.checkpoint(function, x, *args, **kwargs)
        found = torch.autograd.grad(out.sum(), x)
        assert seen == [True, True]
        assert torch.equal(found[0], expected[0])
