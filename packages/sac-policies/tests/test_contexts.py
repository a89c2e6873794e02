"""The contexts engine: gradients of no checkpointing, and what is saved does not run again."""

from __future__ import annotations

import pytest
import torch

import sac_policies
from sac_policies import (
    MATMULS,
    checkpoint,
    offload,
    recompute_all,
    save_all,
    save_by_index,
)

from ._contexts import PRODUCTS, ab, contexts

aten = torch.ops.aten

SAVE = sac_policies.Decision.SAVE


@pytest.mark.parametrize(
    "policy",
    [
        PRODUCTS,
        save_all(),
        sac_policies.recompute_all(),
        sac_policies.save_every_nth(MATMULS, n=2),
        ~PRODUCTS,
        offload("aten.mm"),
        sac_policies.save_by_bytes(at_least=600),
        sac_policies.save_by_flops(at_least=1),
        sac_policies.save_by_shape((None, 16)),
        sac_policies.save_modules("up", "n?"),
        save_by_index({("aten.mm.default", 1): SAVE}),
        lambda ctx, op, *args, **kwargs: op is aten.mm.default,
        [aten.mm.default],
    ],
    ids=str,
)
def test_gradients_are_those_of_no_checkpointing(policy, make_block, x, gradients, equal):
    """Whatever the policy keeps, gradients are bitwise those of the plain block."""
    block = make_block(dropout=0.3)
    plain = gradients(block, x, module=block)
    kept = gradients(lambda t: contexts(block, t, policy=policy), x, module=block)
    assert equal(kept, plain)


def test_saved_product_is_not_run_again(counting):
    """One saved product needs two products in backward, a recomputed one three."""
    a, b = ab()
    saved = contexts(lambda p, q: (p @ q).sin().cos(), a, b, policy=PRODUCTS)
    with counting() as counts:
        saved.sum().backward()
    assert counts["aten.mm.default"] == 2


def test_packet_compared_in_a_function_is_reported():
    """A function that compares overloads with a packet saves nothing; that is said."""
    a, b = ab()
    with pytest.warns(sac_policies.UnmatchedEntryWarning, match=r"aten\.mm \(a packet"):
        contexts(torch.mm, a, b, policy=lambda ctx, op, *args, **kwargs: op in [aten.mm])


def test_func_transform_is_refused_by_name():
    """torch.func cannot differentiate through checkpointing; the error says so."""
    a, b = ab()

    def loss(p):
        return contexts(lambda q: (q @ b.detach()).sin().sum(), p, policy=PRODUCTS)

    with pytest.raises(sac_policies.EngineError, match=r"torch\.func transform is active"):
        torch.func.grad(loss)(a.detach())


def test_custom_autograd_function(gradients, equal):
    """Operators inside a custom autograd.Function are seen and kept."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, q):
            h = p @ q
            ctx.save_for_backward(p, q, h)
            return h.tanh()

        @staticmethod
        def backward(ctx, grad):
            p, q, h = ctx.saved_tensors
            grad = grad * (1 - h.tanh().square())
            return grad @ q.t(), p.t() @ grad

    a, b = ab()
    plain = gradients(lambda p, q: Scaled.apply(p, q).sin(), a, b)
    kept = gradients(
        lambda p, q: contexts(lambda r, s: Scaled.apply(r, s).sin(), p, q, policy=PRODUCTS), a, b
    )
    assert equal(kept, plain)


def test_debugging_of_torch_may_be_on():
    """torch then enters modes of its own between a region and its engine."""
    x = torch.linspace(-1, 1, 6).requires_grad_()
    (plain,) = torch.autograd.grad(x.sin().cos().sum(), x)
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        out = checkpoint(lambda t: t.sin().cos(), x, policy=recompute_all(), engine="contexts")
        (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, plain)
