"""Values that a region keeps or recomputes, how often, and in which memory format."""

from __future__ import annotations

import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac_policies

aten = torch.ops.aten


def leaf(*shape):
    """A leaf of evenly spaced values that requires grad."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


def replay(function, *args):
    """Call a region that keeps as few values as possible."""
    return sac_policies.checkpoint(function, *args, policy=sac_policies.recompute_all())


class Operators(TorchDispatchMode):
    """Counts operators and tracks every storage that they create."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counts[func] += 1
        given = {id(each.untyped_storage()) for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and id(out.untyped_storage()) not in given:
            self.made.append((func, weakref.ref(out.untyped_storage())))
        return out

    def alive_bytes(self, func=None):
        """Bytes of live storages, for one operator or all."""
        found = (ref() for op, ref in self.made if func in (None, op))
        return sum(each.nbytes() for each in {id(s): s for s in found if s is not None}.values())


def _rotated(t, cos, sin):
    left, right = t.chunk(2, -1)
    return t * cos + torch.cat([-right, left], -1) * sin


@pytest.mark.parametrize(
    "kind", [*("residual", "rotary", "tanh", "softmax", "gelu", "row", "filled", "bias", "zeros")]
)
def test_nothing_is_kept_of_what_can_be_rebuilt(kind):
    """Only the output is alive."""
    x, w = leaf(64, 64), leaf(64, 64)
    cos, sin = (torch.linspace(0, 1, 64).add(each).cos() for each in (0, 1))
    function = {
        "residual": lambda t: (t + t.sin()).cos() @ w,
        "rotary": lambda t: _rotated(t.sin(), cos, sin) @ w,
        "tanh": lambda t: (t @ w).tanh() @ w,
        "softmax": lambda t: (t @ w).softmax(-1) @ w,
        "gelu": lambda t: t * (1.0 + torch.tanh(t.sin() + torch.pow(t, 3.0))) @ w,
        "row": lambda t: (t.sin() + cos).cos() @ w,
        "filled": lambda t: t.sin().masked_fill(t.detach() > 0.5, 0.1).cos() @ w,
        "bias": lambda t: F.linear(t.sin(), w, cos).cos() @ w,
        "zeros": lambda t: (torch.zeros(64, 64) * t).cos() @ w,
    }[kind]
    expected = torch.autograd.grad(function(x).sum(), [x, w])
    replay(function, x).sum().backward()  # excludes first-use effects
    with Operators() as forward:
        out = replay(function, x)
    # Fingerprints of parameters are small and made outside of the region.
    assert forward.alive_bytes() < out.nbytes * 1.5
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, w]), expected))


def test_shared_value_is_replayed_once_and_dropped():
    """Two matmuls read one silu; if only one of them runs backward, nothing remains."""
    x, w1, w2 = leaf(5, 4), leaf(4, 4), leaf(4, 4)

    def function(t):
        y = F.silu(t)
        return y @ w1, y @ w2

    one, two = replay(function, x)
    with Operators() as backward:
        torch.autograd.grad(one.sum(), w1, retain_graph=True)
        assert backward.alive_bytes(aten.silu.default) == 0
    with Operators() as backward:
        torch.autograd.grad((one + two).sum(), [x, w1, w2])
    assert backward.counts[aten.silu.default] == 1


def test_input_of_in_place_operator_is_replayed_once():
    """The graph saves a copy of the overwritten value, for the operator and for its replay."""

    def function(t):
        y = F.silu(t)
        y /= t.exp()
        return (y + t).sin()

    out = replay(function, leaf(5, 4))
    with Operators() as backward:
        out.sum().backward()
    assert backward.counts[aten.silu.default] == 1


class Cubed(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx, x):
        """Return x cubed."""
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        """Read the saved input."""
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def test_input_of_a_function_is_dropped_before_backward_ends():
    """Only its node and the replay of its output read it."""
    x, w = leaf(5, 4), leaf(4, 4)
    given, alive = x * 2, []
    given.register_hook(lambda grad: alive.append(backward.alive_bytes(aten.silu.default)))
    out = replay(lambda t: Cubed.apply(F.silu(t)) @ w, given)
    with Operators() as backward:
        out.sum().backward()
    assert alive == [0]


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.BatchNorm2d])
def test_channels_last_is_replayed_as_it_was(kind):
    """The next operator saves the result of a normalization."""
    norm = kind(*((4, 16) if kind is nn.GroupNorm else (16,)))
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    inputs = [x, *norm.parameters()]

    def function(t):
        return F.silu(norm(t))

    expected = torch.autograd.grad(function(x).square().sum(), inputs)
    found = torch.autograd.grad(replay(function, x).square().sum(), inputs)
    assert all(map(torch.equal, found, expected))
    assert found[0].stride() == expected[0].stride()


def attended(t):
    """Attention saves its result; of the sum, only the operands are saved."""
    query, key, value = (each.unsqueeze(0) for each in (t, t.sin(), t.cos()))
    return F.scaled_dot_product_attention(query, key, value).squeeze(0) + t


def differentiated(t):
    """Differentiate inside the region."""
    made = (t + t).sin()
    (inner,) = torch.autograd.grad(made.sum(), t, retain_graph=True)
    return made * inner.detach()


def clamped(t, write=True):
    """Write without changing the version counter, before two readers save the value."""
    h = t @ t.mT
    if write:
        h.data.clamp_(-0.1, 0.1)
    return torch.tanh(h) * h


def written_under_no_grad(t):
    """Write to a value that one reader has saved, before others read it."""
    h = t.exp() + t
    y = h + h.sin()
    with torch.no_grad():
        y.mul_(0.5)
    return (y + y.tanh()).sin() * y


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", [attended, differentiated, clamped, written_under_no_grad])
def test_region_inside_a_checkpoint_of_torch(function, early_stop):
    """torch's checkpoint runs the region again, possibly in another thread.

    Autograd numbers nodes per thread, and an accelerator's backward runs in its own thread.
    """
    x = leaf(1, 8, 16)
    expected = torch.autograd.grad(function(x.exp()).square().sum(), x)[0]
    around = partial(torch_checkpoint, use_reentrant=False, early_stop=early_stop)
    with ThreadPoolExecutor(1) as other:
        for submits in (False, True, False):
            out = around(partial(replay, function), x.exp())
            backward = partial(torch.autograd.grad, out.square().sum(), x)
            found = other.submit(backward).result() if submits else backward()
            assert torch.equal(found[0], expected)


@pytest.mark.parametrize("policy", [[], ["aten.mul"]], ids=["nothing", "products"])
@pytest.mark.parametrize("is_view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
def test_statistics_read_beside_batch_norm_match_plain(policy, is_view, is_first):
    """Batch norm's writes change no version: autograd reads the buffer's later values."""

    def gradients(call):
        torch.manual_seed(0)
        norm, x, w = torch.nn.BatchNorm2d(4), torch.randn(3, 4, 2, 2), torch.randn(4)
        norm.running_mean.normal_()
        w = (w.view(4, 1, 1) if is_view else w).requires_grad_()

        def scaled():
            return w * (norm.running_mean[:, None, None] if is_view else norm.running_mean)

        def function(x):
            first = scaled() if is_first else None
            y = norm(x)
            scale = scaled() if first is None else first
            return (y * scale.reshape(4, 1, 1)).sin()

        call(function, x.requires_grad_()).sum().backward()
        return x.grad, w.grad, norm.running_mean

    found = gradients(lambda function, x: sac_policies.checkpoint(function, x, policy=policy))
    expected = gradients(lambda function, x: function(x))
    assert all(map(torch.equal, found, expected))
