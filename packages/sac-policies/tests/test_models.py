"""Gradients of whole blocks are bit-identical to no checkpointing, under every policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sac_policies import (
    ATTENTION,
    MATMULS,
    checkpoint,
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_ops,
)


def _attention(x, qkv, heads):
    """x is (batch, tokens, width)."""
    b, t, d = x.shape
    q, k, v = qkv(x).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4).unbind(0)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return a.transpose(1, 2).reshape(b, t, d)


class _Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.w1, self.w3 = (nn.Linear(16, 32, bias=False) for _ in range(2))
        self.w2 = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        x = x + self.out(_attention(self.n1(x), self.qkv, 2))
        y = self.n2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class _Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.last = nn.Conv1d(6, 4, 1)

    def forward(self, x):
        return x + self.last(F.relu(self.norm(self.conv(x)), inplace=True))


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return out.view_as(x)


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class _Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(F.dropout(_Swish.apply(self.up(x)), 0.2, self.training)).add_(x)


MODELS = [_Llama, _Convolution, _Experts, _Custom]
POLICIES = {
    "products": save_ops(MATMULS, ATTENTION),
    "second": save_every_nth(MATMULS, n=2),
    "all": save_all(),
    "none": recompute_all(),
    "offload": offload(MATMULS),
    "small": save_by_bytes(at_most=1000),
}


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_bitwise_those_of_no_checkpointing(model, policy, gradients, equal):
    """Two consecutive blocks, and the random state after them."""
    torch.manual_seed(0)
    blocks = nn.Sequential(model(), model())
    x = torch.randn(2, 4, 16, requires_grad=True)

    def run(t):
        for block in blocks:
            t = checkpoint(block, t, policy=policy)
        return t

    plain = gradients(blocks, x, module=blocks)
    state = torch.get_rng_state()
    kept = gradients(run, x, module=blocks)
    assert equal(kept, plain)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("policy", ["products", "all", "offload"])
@pytest.mark.parametrize("model", MODELS)
def test_nested_gradients_are_bitwise_those_of_no_checkpointing(model, policy, gradients, equal):
    """Two regions with different policies inside a third, with in-place operators and dropout."""
    torch.manual_seed(0)
    first, second = blocks = nn.Sequential(model(), model())
    x = torch.randn(2, 4, 16, requires_grad=True)

    def region(function, t, name):
        return checkpoint(function, t, policy=POLICIES[name])

    def run(t):
        return region(second, region(first, t, policy), "second")

    kept = gradients(lambda t: region(run, t, policy), x, module=blocks)
    assert equal(kept, gradients(blocks, x, module=blocks))


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("model", MODELS)
def test_compiled_gradients_are_those_of_eager(model, gradients):
    """Every second matmul is saved; gradients are close to eager's.

    Without dropout, since the compiler draws its own random numbers.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    block = model()
    x = torch.randn(2, 4, 16, requires_grad=True)
    block.train(not isinstance(block, _Custom))

    def run(t):
        return checkpoint(block, t, policy=POLICIES["second"])

    compiled = torch.compile(run, backend="aot_eager_decomp_partition")
    wanted = gradients(block, x, module=block)
    torch.testing.assert_close(gradients(compiled, x, module=block), wanted)
