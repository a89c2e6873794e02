"""Contexts engine: what a forward leaves serves each backward, in the order of its draws."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac_policies
from sac_policies import Decision, context_fn, save_all, save_by_index, save_ops
from sac_policies.engines.contexts._kept import keep
from sac_policies.engines.contexts._regions import Region

from ._contexts import PRODUCTS, ab, contexts

SAVE = Decision.SAVE


def _modes(policy, root=None):
    """Give the two modes, and a context_fn that returns just these."""
    modes = context_fn(policy, root=root)()
    return modes, lambda: modes


def test_second_backward_over_a_retained_graph_gives_the_same():
    """retain_graph and a second backward work, values still saved."""
    a, b = ab()
    out = contexts(lambda p, q: (p @ q).sin(), a, b, policy=PRODUCTS).sum()
    first = torch.autograd.grad(out, (a, b), retain_graph=True)
    second = torch.autograd.grad(out, (a, b))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_saved_value_serves_every_retained_backward(counting):
    """Three backwards over a retained graph run the saved product no further time."""
    a, b = ab()
    out = contexts(lambda p, q: (p @ q).sin(), a, b, policy=PRODUCTS).sum()
    with counting() as counts:
        for _ in range(3):
            torch.autograd.grad(out, (a, b), retain_graph=True)
    assert counts["aten.mm.default"] == 3 * 2


def test_double_backward():
    """Second derivatives are exact."""
    torch.manual_seed(0)
    a = torch.randn(4, 4, dtype=torch.double, requires_grad=True)

    def second(function):
        (first,) = torch.autograd.grad(function(a).sum(), a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), a)[0]

    kept = second(lambda p: contexts(lambda q: (q @ q).sin(), p, policy=PRODUCTS))
    assert torch.equal(kept, second(lambda p: (p @ p).sin()))


def test_two_backwards_over_disjoint_outputs():
    """Two outputs of a region can be differentiated one after the other, as without a policy."""
    a, b = ab()

    def body(p, q):
        return (p @ q).sin(), (q @ p).cos()

    plain = [torch.autograd.grad(each.sum(), (a, b)) for each in body(a, b)]
    kept = [
        torch.autograd.grad(each.sum(), (a, b)) for each in contexts(body, a, b, policy=PRODUCTS)
    ]
    assert all(
        torch.equal(x, y)
        for left, right in zip(plain, kept, strict=True)
        for x, y in zip(left, right, strict=True)
    )


def test_nothing_is_kept_after_backward():
    """What backward did not read is dropped when its recomputation ends."""
    a, b = ab()
    (forward, _), make = _modes(PRODUCTS)
    out = torch_checkpoint(
        lambda p, q: (p @ q).sin() @ q, a, b, use_reentrant=False, context_fn=make
    )
    assert len(forward.region.kept) == 2
    out.sum().backward()
    assert not forward.region.kept


def test_graph_is_freed_without_the_garbage_collector():
    """Dropping the output frees every kept value by reference counts alone."""
    a, b = ab()
    gc.disable()
    try:
        (forward, _), make = _modes(save_all())
        out = torch_checkpoint(
            lambda p, q: (p @ q).sin(), a, b, use_reentrant=False, context_fn=make
        )
        region = weakref.ref(forward)
        assert forward.region.kept
        del forward, make, out, _
        assert region() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("saved", [0, 1, 2])
def test_one_of_several_random_operators_is_saved(saved, gradients, equal):
    """Recomputed random numbers do not shift when others are saved."""
    a, _ = ab()

    def body(p):
        u, v, w = (torch.rand_like(p.detach()) for _ in range(3))
        return ((p * u).sin() * v).cos() * w

    plain = gradients(body, a)
    policy = save_by_index({("aten.rand_like.default", saved): SAVE})
    assert equal(gradients(lambda p: contexts(body, p, policy=policy), a), plain)


@pytest.mark.parametrize("saved", [0, 1])
def test_one_of_two_dropout_masks_is_saved(saved, gradients, equal):
    """CPU dropout draws its mask in place and then scales it; both stay right (B3, B4)."""
    a, _ = ab()

    def body(p):
        return F.dropout(F.dropout(p.sin(), 0.5).cos(), 0.5) * p.exp()

    plain = gradients(body, a)
    policy = save_by_index({("aten.bernoulli_.float", saved): SAVE})
    assert equal(gradients(lambda p: contexts(body, p, policy=policy), a), plain)


def test_saved_random_operator_without_a_later_one_does_not_draw(counting):
    """A saved random value is not drawn again for nothing."""
    a, _ = ab()
    out = contexts(lambda p: (p * torch.rand_like(p)).sin(), a, policy=save_ops("aten.rand_like"))
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.rand_like.default"] == 0


def test_counting_policy_starts_afresh_in_every_region():
    """Every second product is saved in each of three regions of three products."""
    a, b = ab()
    policy = sac_policies.save_every_nth("aten.mm", n=2)

    def body(p, q):
        return ((p @ q).sin() @ q).cos() @ q

    for _ in range(3):
        rows = sac_policies.report(body, a, b, policy=policy).kept
        assert [row.index for row in rows] == [0, 2]


def _region(**kept: int) -> Region:
    """A region that keeps a tensor of ones for each of these numbers."""
    region = Region(PRODUCTS, None, False)
    for name, drawn in kept.items():
        region.kept[name, 0] = keep(torch.ones(2), None, False, drawn)
    return region


def test_draws_are_numbered_from_one_and_the_last_recomputed_is_known():
    """A kept one before it draws again, one after it does not (Rule 3)."""
    region = _region()
    assert [region.draw(keeps) for keeps in (True, False, True)] == [1, 2, 3]
    assert region.last_recomputed_draw == 2


def test_regions_inside_are_found_by_their_place():
    """Past the last one there is none."""
    region, first, second = _region(), _region(), _region()
    region.add(first)
    region.add(second)
    assert [region.child(at) for at in range(3)] == [first, second, None]


def test_region_inside_a_second_run_knows_what_stood_there_in_the_first():
    """A run for the first time has nothing to know."""
    before, again = _region(), _region()
    stood = [_region(), _region()]
    assert [before.add(each) for each in stood] == [None, None]
    again.origin = before
    assert [again.add(_region()) for _ in range(3)] == [*stood, None]


def test_cleared_region_keeps_no_value_and_knows_what_was_not_read():
    """Nor do those inside it, whose places stay (Rule 2)."""
    region, inner, innermost = _region(a=0, b=0), _region(c=0), _region(d=0)
    region.add(inner)
    inner.add(innermost)
    region.clear()
    assert region.kept == {}
    assert region.unread == (("a", 0), ("b", 0))
    assert region.child(0).kept == region.child(0).child(0).kept == {}
    assert region.child(0).finished
    assert region.child(0).policy == PRODUCTS


def test_values_handed_on_by_the_first_run_are_protected_too():
    """A write in the second one would be to both."""
    before, again = _region(a=0), _region()
    again.origin = before
    (value,) = before.kept["a", 0].resident()
    again.protect([value])
    value.zero_()
    assert torch.equal(before.kept["a", 0].read(None, PRODUCTS, last=True), torch.ones(2))
