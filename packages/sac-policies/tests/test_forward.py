"""Contexts engine: a first run keeps values under the calls that made them."""

from __future__ import annotations

import torch

import sac_policies
from sac_policies import save_ops

from ._contexts import PRODUCTS, ab, contexts


def test_inner_region_keeps_its_value_for_the_outer_one(counting, gradients, equal):
    """Recomputing the outer region does not run the inner one's saved product again."""
    a, b = ab()

    def inner(p, q):
        return contexts(lambda r, s: (r @ s).sin(), p, q, policy=PRODUCTS)

    def outer(p, q):
        return inner(p, q).cos() @ q

    def nested(p, q):
        return contexts(outer, p, q, policy=save_ops("aten.sin"))

    out = nested(a, b).sum()
    with counting() as counts:
        out.backward()
    assert counts["aten.mm.default"] == 4
    assert equal(gradients(nested, a, b), gradients(lambda p, q: (p @ q).sin().cos() @ q, a, b))


def test_three_regions_deep_each_call_keeps_its_number(gradients, equal):
    """A value that the middle region hands over counts as a call of the outermost one."""
    a, b = ab()

    def inner(p, q):
        return contexts(lambda r, s: (r @ s).sin() @ s, p, q, policy=PRODUCTS)

    def middle(p, q):
        return contexts(lambda r, s: inner(r, s).cos() @ s, p, q, policy=PRODUCTS)

    def outer(p, q):
        return (middle(p, q).sin() @ q).cos() @ q

    def plain(p, q):
        return (((((p @ q).sin() @ q).cos() @ q).sin()) @ q).cos() @ q

    found = gradients(lambda p, q: contexts(outer, p, q, policy=PRODUCTS), a, b)
    assert equal(found, gradients(plain, a, b))


def test_named_tensor_is_kept_under_the_call_that_made_it(counting, gradients, equal):
    """Naming the product's output saves the product: it is not run again."""
    a, b = ab()

    def body(p, q):
        return sac_policies.name(p @ q, "h").sin() @ q

    policy = sac_policies.save_named("h")
    out = contexts(body, a, b, policy=policy)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 4
    assert equal(
        gradients(lambda p, q: contexts(body, p, q, policy=policy), a, b), gradients(body, a, b)
    )


def test_named_output_among_several_is_kept(counting):
    """One named output of an operator with several keeps the operator."""
    a, _ = ab()

    def body(p):
        values, _ = p.sin().topk(3)
        return sac_policies.name(values, "top").cos()

    out = contexts(body, a, policy=sac_policies.save_named("top"))
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.topk.default"] == 0


def test_named_input_needs_no_keeping():
    """Naming a region's input changes nothing: it is saved already."""
    a, _ = ab()
    out = contexts(
        lambda p: sac_policies.name(p, "in").sin(), a, policy=sac_policies.save_named("in")
    )
    out.sum().backward()
    assert torch.equal(a.grad, a.cos())
