"""The contexts engine: right where saving some values and recomputing others can go wrong."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac_policies
from sac_policies import (
    MATMULS,
    MutationError,
    RecomputeError,
    checkpoint,
    context_fn,
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_by_index,
    save_named,
    save_ops,
)
from sac_policies.engines._engine_disabled import EngineDisabled, active, own_work

aten = torch.ops.aten
SAVE = sac_policies.Decision.SAVE
PRODUCTS = save_ops("aten.mm")


def _ab() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def _contexts(function, *args, policy, **kwargs):
    return checkpoint(function, *args, policy=policy, engine="contexts", **kwargs)


def _modes(policy, root=None):
    """Give the two modes, and a context_fn that returns just these."""
    modes = context_fn(policy, root=root)()
    return modes, lambda: modes


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
    kept = gradients(lambda t: _contexts(block, t, policy=policy), x, module=block)
    assert equal(kept, plain)


def test_saved_product_is_not_run_again(counting):
    """One saved product needs two products in backward, a recomputed one three."""
    a, b = _ab()
    saved = _contexts(lambda p, q: (p @ q).sin().cos(), a, b, policy=PRODUCTS)
    with counting() as counts:
        saved.sum().backward()
    assert counts["aten.mm.default"] == 2


def test_offload_is_honoured_in_eager(counting):
    """An offloaded value is brought back, not computed again."""
    a, b = _ab()
    kept = _contexts(lambda p, q: (p @ q).sin().cos(), a, b, policy=offload("aten.mm"))
    with counting() as counts:
        kept.sum().backward()
    assert counts["aten.mm.default"] == 2


def test_packet_compared_in_a_function_is_reported():
    """A function that compares overloads with a packet saves nothing; that is said."""
    a, b = _ab()
    with pytest.warns(sac_policies.UnmatchedEntryWarning, match=r"aten\.mm \(a packet"):
        _contexts(torch.mm, a, b, policy=lambda ctx, op, *args, **kwargs: op in [aten.mm])


def test_in_place_change_of_a_saved_value_inside_the_region(gradients, equal):
    """A saved value is kept as it was when a later operator writes over it."""
    a, b = _ab()

    def body(p, q):
        return torch.selu_(p @ q).sin()

    plain = gradients(body, a, b)
    assert equal(gradients(lambda p, q: _contexts(body, p, q, policy=PRODUCTS), a, b), plain)


def test_saved_in_place_operator_writes_its_value_back(gradients, equal):
    """A saved in-place operator leaves its value in the tensor it wrote to."""
    a, b = _ab()

    def body(p, q):
        h = p @ q
        torch.selu_(h)
        return h.sin()

    plain = gradients(body, a, b)
    policy = save_ops("aten.elu_")
    assert equal(gradients(lambda p, q: _contexts(body, p, q, policy=policy), a, b), plain)


def _through_view(p, q):
    y = p @ q
    y.view(-1).mul_(2)
    return y.sin()


def _under_view(p, q):
    y = p @ q
    row = y[1]
    y.mul_(2)
    return row.sin()


def _into_row(p, q):
    y = p @ q
    y[0] = 3.0
    return y.sin() * y.t()


VIEWS = ("aten.view", "aten.select.int", "aten.t")


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("body", [_through_view, _under_view, _into_row])
@pytest.mark.parametrize(
    "policy",
    [
        save_all(),
        save_ops(*VIEWS),
        save_ops("aten.mm", *VIEWS),
        offload(save_all()),
        save_by_bytes(),
        save_by_bytes() | save_named("none", missing_ok=True),
    ],
    ids=["all", "views", "both", "offload", "asked", "asked with names"],
)
def test_views_stay_views_of_what_is_written_to(body, policy, gradients, equal):
    """A saved view and its saved base see each other's changes in the recomputation too."""
    a, b = _ab()
    found = gradients(lambda p, q: _contexts(body, p, q, policy=policy), a, b)
    assert equal(found, gradients(body, a, b))


@pytest.mark.parametrize("saved", [0, 1, 2])
def test_one_of_several_random_operators_is_saved(saved, gradients, equal):
    """Recomputed random numbers do not shift when others are saved."""
    a, _ = _ab()

    def body(p):
        u, v, w = (torch.rand_like(p.detach()) for _ in range(3))
        return ((p * u).sin() * v).cos() * w

    plain = gradients(body, a)
    policy = save_by_index({("aten.rand_like.default", saved): SAVE})
    assert equal(gradients(lambda p: _contexts(body, p, policy=policy), a), plain)


@pytest.mark.parametrize("saved", [0, 1])
def test_one_of_two_dropout_masks_is_saved(saved, gradients, equal):
    """CPU dropout draws its mask in place and then scales it; both stay right (B3, B4)."""
    a, _ = _ab()

    def body(p):
        return F.dropout(F.dropout(p.sin(), 0.5).cos(), 0.5) * p.exp()

    plain = gradients(body, a)
    policy = save_by_index({("aten.bernoulli_.float", saved): SAVE})
    assert equal(gradients(lambda p: _contexts(body, p, policy=policy), a), plain)


def test_saved_random_operator_without_a_later_one_does_not_draw(counting):
    """A saved random value is not drawn again for nothing."""
    a, _ = _ab()
    out = _contexts(lambda p: (p * torch.rand_like(p)).sin(), a, policy=save_ops("aten.rand_like"))
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.rand_like.default"] == 0


def test_second_backward_over_a_retained_graph_gives_the_same():
    """retain_graph and a second backward work, values still saved."""
    a, b = _ab()
    out = _contexts(lambda p, q: (p @ q).sin(), a, b, policy=PRODUCTS).sum()
    first = torch.autograd.grad(out, (a, b), retain_graph=True)
    second = torch.autograd.grad(out, (a, b))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_saved_value_serves_every_retained_backward(counting):
    """Three backwards over a retained graph run the saved product no further time."""
    a, b = _ab()
    out = _contexts(lambda p, q: (p @ q).sin(), a, b, policy=PRODUCTS).sum()
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

    kept = second(lambda p: _contexts(lambda q: (q @ q).sin(), p, policy=PRODUCTS))
    assert torch.equal(kept, second(lambda p: (p @ p).sin()))


def test_two_backwards_over_disjoint_outputs():
    """Two outputs of a region can be differentiated one after the other, as without a policy."""
    a, b = _ab()

    def body(p, q):
        return (p @ q).sin(), (q @ p).cos()

    plain = [torch.autograd.grad(each.sum(), (a, b)) for each in body(a, b)]
    kept = [
        torch.autograd.grad(each.sum(), (a, b)) for each in _contexts(body, a, b, policy=PRODUCTS)
    ]
    assert all(
        torch.equal(x, y)
        for left, right in zip(plain, kept, strict=True)
        for x, y in zip(left, right, strict=True)
    )


def test_backward_inside_the_region(gradients, equal):
    """A gradient taken in the middle of the function is not part of its forward."""
    a, b = _ab()

    def body(p, q):
        h = (p @ q).sin()
        (g,) = torch.autograd.grad(h.sum(), p, retain_graph=True)
        return (h @ q) * g

    plain = gradients(body, a, b)
    kept = gradients(lambda p, q: _contexts(body, p, q, policy=PRODUCTS, early_stop=False), a, b)
    assert equal(kept, plain)


@pytest.mark.parametrize("inside", [recompute_all(), save_all(), save_ops("aten.sin", "aten.cat")])
@pytest.mark.parametrize("early_stop", [True, False])
def test_backward_inside_a_region_inside_recomputes_nothing_of_its_own(
    early_stop, inside, gradients, equal
):
    """A gradient in the inner region recomputes the outer one; the inner one counts none of it."""
    a, b = _ab()

    def inner(h):
        y = torch.cat([h.sin(), h.cos()])
        (g,) = torch.autograd.grad(y.sum(), a, retain_graph=True)
        return torch.cat([y[4:] * g[:4].sin(), y[:4].sin()]) @ b

    def outer(p, q, run):
        h = torch.cat([p, q.sin()]).mul(0.5).tanh()[:4]
        return run((h @ q).sin()).relu().cos()

    def region(h):
        return _contexts(inner, h, policy=inside, early_stop=early_stop)

    plain = gradients(lambda p, q: outer(p, q, inner), a, b)
    for policy in (recompute_all(), PRODUCTS, save_ops("aten.cat")):
        kept = gradients(
            lambda p, q, policy=policy: _contexts(
                lambda p, q: outer(p, q, region), p, q, policy=policy, early_stop=early_stop
            ),
            a,
            b,
        )
        assert equal(kept, plain)


def test_debug_names_the_first_operator_that_differs():
    """debug=True works with a policy, and names what changed and where."""
    a, b = _ab()
    flip = iter([torch.sin, torch.cos])

    def body(p, q):
        return next(flip)((p @ q).exp()) * q

    out = _contexts(body, a, b, policy=PRODUCTS, debug=True)
    with pytest.raises(RecomputeError, match=r"is aten.cos.default \(at .*test_contexts.py:\d+ in"):
        out.sum().backward()


def test_counting_policy_starts_afresh_in_every_region():
    """Every second product is saved in each of three regions of three products."""
    a, b = _ab()
    policy = sac_policies.save_every_nth("aten.mm", n=2)

    def body(p, q):
        return ((p @ q).sin() @ q).cos() @ q

    for _ in range(3):
        rows = sac_policies.report(body, a, b, policy=policy).kept
        assert [row.index for row in rows] == [0, 2]


def test_nothing_is_kept_after_backward():
    """What backward did not read is dropped when its recomputation ends."""
    a, b = _ab()
    (forward, _), make = _modes(PRODUCTS)
    out = torch_checkpoint(
        lambda p, q: (p @ q).sin() @ q, a, b, use_reentrant=False, context_fn=make
    )
    assert len(forward.region.kept) == 2
    out.sum().backward()
    assert not forward.region.kept


def test_graph_is_freed_without_the_garbage_collector():
    """Dropping the output frees every kept value by reference counts alone."""
    a, b = _ab()
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


def test_saved_values_pass_through_the_users_hooks():
    """Saved-tensor hooks around the region see its saved values too."""
    a, b = _ab()
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        out = _contexts(lambda p, q: (p @ q[:, :3]).sin(), a, b, policy=PRODUCTS)
    assert (8, 3) in packed
    out.sum().backward()


def test_func_transform_is_refused_by_name():
    """torch.func cannot differentiate through checkpointing; the error says so."""
    a, b = _ab()

    def loss(p):
        return _contexts(lambda q: (q @ b.detach()).sin().sum(), p, policy=PRODUCTS)

    with pytest.raises(sac_policies.EngineError, match=r"torch\.func transform is active"):
        torch.func.grad(loss)(a.detach())


def test_inner_region_keeps_its_value_for_the_outer_one(counting, gradients, equal):
    """Recomputing the outer region does not run the inner one's saved product again."""
    a, b = _ab()

    def inner(p, q):
        return _contexts(lambda r, s: (r @ s).sin(), p, q, policy=PRODUCTS)

    def outer(p, q):
        return inner(p, q).cos() @ q

    def nested(p, q):
        return _contexts(outer, p, q, policy=save_ops("aten.sin"))

    out = nested(a, b).sum()
    with counting() as counts:
        out.backward()
    assert counts["aten.mm.default"] == 4
    assert equal(gradients(nested, a, b), gradients(lambda p, q: (p @ q).sin().cos() @ q, a, b))


def test_three_regions_deep_each_call_keeps_its_number(gradients, equal):
    """A value that the middle region hands over counts as a call of the outermost one."""
    a, b = _ab()

    def inner(p, q):
        return _contexts(lambda r, s: (r @ s).sin() @ s, p, q, policy=PRODUCTS)

    def middle(p, q):
        return _contexts(lambda r, s: inner(r, s).cos() @ s, p, q, policy=PRODUCTS)

    def outer(p, q):
        return (middle(p, q).sin() @ q).cos() @ q

    def plain(p, q):
        return (((((p @ q).sin() @ q).cos() @ q).sin()) @ q).cos() @ q

    found = gradients(lambda p, q: _contexts(outer, p, q, policy=PRODUCTS), a, b)
    assert equal(found, gradients(plain, a, b))


@pytest.fixture
def _process_group(tmp_path):
    """Have a process group; one that another test left is as good."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_collectives_of_torch_itself_are_not_counted(counting):
    """A gather that runs in the forward only does not disturb the region (pytorch#185178)."""
    a, b = _ab()
    runs, flag = iter([True, False]), torch.ones(2)

    def body(p, q):
        if next(runs):
            dist.all_reduce(flag)
        return (p @ q).sin()

    out = _contexts(body, a, b, policy=save_all(), debug=True)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 2


@pytest.mark.parametrize(("forward", "again"), [(3, 2), (1, 0)])
def test_operator_that_is_missing_in_the_recomputation_is_an_error(forward, again):
    """A recomputation that ends early for want of operators names the one that is missing."""
    a, b = _ab()
    runs = iter([forward, again])

    def body(p, q):
        for _ in range(next(runs)):
            p = p @ q
        return p.sin()

    out = _contexts(body, a, b, policy=save_ops("aten.mm"))
    with pytest.raises(
        RecomputeError,
        match=rf"operator aten\.mm\.default ran {again} times in the recomputation .* "
        rf"{forward} times in the forward",
    ):
        out.sum().backward()


def test_change_of_a_saved_value_after_the_region_is_an_error():
    """A saved output that the caller overwrites is reported with operator and line."""
    a, b = _ab()
    held = []

    def body(p, q):
        h = p @ q
        held.append(h.detach())
        return h.sin()

    out = _contexts(body, a, b, policy=PRODUCTS)
    held[0].zero_()
    with pytest.raises(MutationError, match=r"output of aten.mm.default .*contexts.py:\d+ in body"):
        out.sum().backward()


def test_more_calls_in_the_recomputation_are_an_error():
    """An operator that the forward did not run is reported with its count and line."""
    a, b = _ab()
    times = iter([1, 2])

    def body(p, q):
        with torch.no_grad():
            for _ in range(next(times)):
                q @ p
        return (p @ q).sin()

    out = _contexts(body, a, b, policy=PRODUCTS)
    with pytest.raises(RecomputeError, match=r"mm.default runs for the 3\. time .*ran it 2 times"):
        out.sum().backward()


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

    a, b = _ab()
    plain = gradients(lambda p, q: Scaled.apply(p, q).sin(), a, b)
    kept = gradients(
        lambda p, q: _contexts(lambda r, s: Scaled.apply(r, s).sin(), p, q, policy=PRODUCTS), a, b
    )
    assert equal(kept, plain)


def test_batch_norm_updates_its_statistics_once_when_saved(equal):
    """A saved batch norm does not count the batch a second time in backward."""
    torch.manual_seed(0)
    plain, kept = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    a, _ = _ab()
    plain(a.sin()).square().sum().backward()
    policy = save_ops("aten.native_batch_norm")
    _contexts(lambda p: kept(p.sin()), a, policy=policy).square().sum().backward()
    assert torch.equal(plain.running_mean, kept.running_mean)


def test_named_tensor_is_kept_under_the_call_that_made_it(counting, gradients, equal):
    """Naming the product's output saves the product: it is not run again."""
    a, b = _ab()

    def body(p, q):
        return sac_policies.name(p @ q, "h").sin() @ q

    policy = sac_policies.save_named("h")
    out = _contexts(body, a, b, policy=policy)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 4
    assert equal(
        gradients(lambda p, q: _contexts(body, p, q, policy=policy), a, b), gradients(body, a, b)
    )


def test_named_output_among_several_is_kept(counting):
    """One named output of an operator with several keeps the operator."""
    a, _ = _ab()

    def body(p):
        values, _ = p.sin().topk(3)
        return sac_policies.name(values, "top").cos()

    out = _contexts(body, a, policy=sac_policies.save_named("top"))
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.topk.default"] == 0


def test_named_input_needs_no_keeping():
    """Naming a region's input changes nothing: it is saved already."""
    a, _ = _ab()
    out = _contexts(
        lambda p: sac_policies.name(p, "in").sin(), a, policy=sac_policies.save_named("in")
    )
    out.sum().backward()
    assert torch.equal(a.grad, a.cos())


def test_own_work_gives_each_mode_its_table_back() -> None:
    """Also where modes came and went meanwhile, as when unpacking runs a region again."""
    modes = [SimpleNamespace(op_table=name) for name in ("outer", "inner")]
    active.modes[:] = modes
    try:
        with own_work():
            assert all(isinstance(mode.op_table, EngineDisabled) for mode in modes)
            active.leave(modes[1])
        assert [mode.op_table for mode in modes] == ["outer", "inner"]
    finally:
        active.modes.clear()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("gradients_inside", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_gradient_inside_a_region_runs_nothing_the_forward_has_not(
    early_stop, gradients_inside, nested, equal
):
    """What comes after it, a cache that grows and a normalisation, finds things as without."""
    a, b = _ab()

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
        return _contexts(function, *args, policy=PRODUCTS, early_stop=early_stop)

    def twice(function, *args):
        return region(lambda *given: region(function, *given), *args)

    assert equal(run(twice if nested else region), run(lambda function, *args: function(*args)))


@pytest.mark.parametrize("early_stop", [True, False])
def test_gradient_inside_a_region_leaves_what_is_kept_for_backward(early_stop, counting):
    """The product and that of its gradient are the region's, and kept: backward repeats none."""
    a, b = _ab()

    def body(p, q):
        h = (p @ q).sin()
        (g,) = torch.autograd.grad(h.sum(), p)
        return h.detach() * g.cos() * p.exp()

    out = _contexts(body, a, b, policy=PRODUCTS, early_stop=early_stop)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 0


def _around(kind, function, x):
    """Run a function inside of something that has to make what the function is given again."""
    if kind == "plain":
        return function(x)
    if kind == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t * 0.5):
            return function(x)
    if kind == "torch":
        return torch_checkpoint(function, x, use_reentrant=False)
    return checkpoint(function, x, policy=recompute_all(), engine=kind)


@pytest.mark.parametrize("kind", ["recipe", "contexts", "torch", "hooks"])
@pytest.mark.parametrize("before", ["an operator", "a region"])
def test_inputs_brought_back_for_a_gradient_inside_are_no_calls_of_the_region(kind, before, equal):
    """What is kept of later calls would be handed out for others."""
    a, b = _ab()
    every_other = sac_policies.save_every_nth("aten.mul.Tensor", n=2)

    def region(function, t):
        return _contexts(function, t, policy=every_other)

    def body(y, run):
        for _ in range(2):
            z = y.detach().requires_grad_()
            (g,) = torch.autograd.grad((z * b.detach()).sin().sum(), z)
            y = y * g
        return run(lambda t: t.sin() * t, y).sin()

    def given(t, run):
        return t.cos() * b if before == "an operator" else run(lambda u: u.cos() * b * u, t)

    def step(kind, run):
        out = _around(kind, lambda t: run(lambda y: body(y, run), given(t, run)), a)
        return [out, *torch.autograd.grad(out.square().sum(), (a, b))]

    assert equal(step(kind, region), step("plain", lambda function, t: function(t)))


@pytest.mark.parametrize("policy", [recompute_all(), save_ops("flex_attention")])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_higher_order_operator_runs_in_a_region(policy):
    """In eager code too; here its inputs need no gradient, which it has on no CPU."""
    q, w = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16), torch.ones(16, requires_grad=True)

    def body(t):
        return (flex_attention(q, q, q) * t).sin()

    plain = torch.autograd.grad(body(w).sum(), w)
    kept = torch.autograd.grad(_contexts(body, w, policy=policy).sum(), w)
    assert torch.equal(plain[0], kept[0])
