"""The contexts engine: gradients of no checkpointing, and what is saved does not run again."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import sac_policies
from sac_policies import (
    MATMULS,
    checkpoint,
    offload,
    recompute_all,
    save_all,
    save_by_index,
    save_ops,
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


def test_offload_is_honoured_in_eager(counting):
    """An offloaded value is brought back, not computed again."""
    a, b = ab()
    kept = contexts(lambda p, q: (p @ q).sin().cos(), a, b, policy=offload("aten.mm"))
    with counting() as counts:
        kept.sum().backward()
    assert counts["aten.mm.default"] == 2


def test_packet_compared_in_a_function_is_reported():
    """A function that compares overloads with a packet saves nothing; that is said."""
    a, b = ab()
    with pytest.warns(sac_policies.UnmatchedEntryWarning, match=r"aten\.mm \(a packet"):
        contexts(torch.mm, a, b, policy=lambda ctx, op, *args, **kwargs: op in [aten.mm])


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


def test_saved_values_pass_through_the_users_hooks():
    """Saved-tensor hooks around the region see its saved values too."""
    a, b = ab()
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        out = contexts(lambda p, q: (p @ q[:, :3]).sin(), a, b, policy=PRODUCTS)
    assert (8, 3) in packed
    out.sum().backward()


def test_func_transform_is_refused_by_name():
    """torch.func cannot differentiate through checkpointing; the error says so."""
    a, b = ab()

    def loss(p):
        return contexts(lambda q: (q @ b.detach()).sin().sum(), p, policy=PRODUCTS)

    with pytest.raises(sac_policies.EngineError, match=r"torch\.func transform is active"):
        torch.func.grad(loss)(a.detach())


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


@pytest.mark.parametrize("policy", [recompute_all(), save_ops("flex_attention")])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_higher_order_operator_runs_in_a_region(policy):
    """In eager code too; here its inputs need no gradient, which it has on no CPU."""
    q, w = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16), torch.ones(16, requires_grad=True)

    def body(t):
        return (flex_attention(q, q, q) * t).sin()

    plain = torch.autograd.grad(body(w).sum(), w)
    kept = torch.autograd.grad(contexts(body, w, policy=policy).sum(), w)
    assert torch.equal(plain[0], kept[0])


@pytest.mark.parametrize(
    "policy", [recompute_all(), save_ops("aten.mm"), save_all()], ids=["none", "mm", "all"]
)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.unsqueeze_(0),
        lambda t: t.t_(),
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(1).squeeze_(1),
        lambda t: t.as_strided_((3, 4), (1, 3)),
    ],
    ids=["unsqueeze", "t", "transpose", "squeeze", "as_strided"],
)
def test_operators_that_change_a_shape_in_place(policy, change):
    """What is kept of the value before them is kept in its own shape."""
    w = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()

    def function(t):
        made = t @ w @ w.t()
        return change(made).sin()

    plain = torch.autograd.grad(function(x).sum(), [x, w])
    out = checkpoint(function, x, policy=policy, engine="contexts")
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, w]), plain))


def test_debugging_of_torch_may_be_on():
    """torch then enters modes of its own between a region and its engine."""
    x = torch.linspace(-1, 1, 6).requires_grad_()
    (plain,) = torch.autograd.grad(x.sin().cos().sum(), x)
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        out = checkpoint(lambda t: t.sin().cos(), x, policy=recompute_all(), engine="contexts")
        (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, plain)
