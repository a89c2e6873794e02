"""Gradients that a function takes of itself inside its region."""

from __future__ import annotations

import pytest
import torch

from sac_policies import checkpoint, recompute_all, save_all, save_ops

PRODUCTS = save_ops("aten.mm")


def ab() -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of (8, 8), the same in every test."""
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def test_backward_inside_the_region(gradients, equal):
    """A gradient taken in the middle of the function is not part of its forward."""
    a, b = ab()

    def body(p, q):
        h = (p @ q).sin()
        (g,) = torch.autograd.grad(h.sum(), p, retain_graph=True)
        return (h @ q) * g

    plain = gradients(body, a, b)
    kept = gradients(lambda p, q: checkpoint(body, p, q, policy=PRODUCTS), a, b)
    assert equal(kept, plain)


@pytest.mark.parametrize("inside", [recompute_all(), save_all(), save_ops("aten.sin", "aten.cat")])
def test_backward_inside_a_region_inside_recomputes_nothing_of_its_own(inside, gradients, equal):
    """A gradient in the inner region recomputes the outer one; the inner one counts none of it."""
    a, b = ab()

    def inner(h):
        y = torch.cat([h.sin(), h.cos()])
        (g,) = torch.autograd.grad(y.sum(), a, retain_graph=True)
        return torch.cat([y[4:] * g[:4].sin(), y[:4].sin()]) @ b

    def outer(p, q, run):
        h = torch.cat([p, q.sin()]).mul(0.5).tanh()[:4]
        return run((h @ q).sin()).relu().cos()

    def region(h):
        return checkpoint(inner, h, policy=inside)

    plain = gradients(lambda p, q: outer(p, q, inner), a, b)
    for policy in (recompute_all(), PRODUCTS, save_ops("aten.cat")):
        kept = gradients(
            lambda p, q, policy=policy: checkpoint(
                lambda p, q: outer(p, q, region), p, q, policy=policy
            ),
            a,
            b,
        )
        assert equal(kept, plain)


@pytest.mark.parametrize("gradients_inside", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_gradient_inside_a_region_runs_nothing_the_forward_has_not(gradients_inside, nested, equal):
    """What comes after it, a cache that grows and a normalisation, finds things as without."""
    a, b = ab()

    def body(y, q, cache, norm):
        for _ in range(gradients_inside):
            z = (y @ q).sin()
            (g,) = torch.autograd.grad(z.sum(), y, retain_graph=True)
            y = z * g
        cache.append(norm(y))
        return sum(cache) @ q * len(cache)

    def run(region):
        cache, norm = [], torch.nn.BatchNorm1d(b.shape[1])
        out = region(body, a.sin(), b, cache, norm)
        seen = [out, norm.running_mean.clone(), norm.num_batches_tracked.clone()]
        assert len(cache) == 1
        return [*seen, *torch.autograd.grad(out.square().sum(), (a, b))]

    def region(function, *args):
        return checkpoint(function, *args, policy=PRODUCTS)

    def twice(function, *args):
        return region(lambda *given: region(function, *given), *args)

    assert equal(run(twice if nested else region), run(lambda function, *args: function(*args)))


def test_gradient_inside_a_region_leaves_what_is_kept_for_backward(counting):
    """The product and that of its gradient are the region's, and kept: backward repeats none."""
    a, b = ab()

    def body(p, q):
        h = (p @ q).sin()
        (g,) = torch.autograd.grad(h.sum(), p)
        return h.detach() * g.cos() * p.exp()

    out = checkpoint(body, a, b, policy=PRODUCTS)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 0
