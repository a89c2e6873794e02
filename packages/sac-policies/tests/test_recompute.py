"""Contexts engine: a recomputation that runs other operators is an error that names them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy

from sac_policies import MutationError, RecomputeError, recompute_all, save_all, save_ops
from sac_policies._torch_compat import saved_tensor_hooks

from ._contexts import PRODUCTS, ab, contexts


def test_debug_names_the_first_operator_that_differs():
    """debug=True works with a policy, and names what changed and where."""
    a, b = ab()
    flip = iter([torch.sin, torch.cos])

    def body(p, q):
        return next(flip)((p @ q).exp()) * q

    out = contexts(body, a, b, policy=PRODUCTS, debug=True)
    with pytest.raises(
        RecomputeError, match=r"is aten.cos.default \(at .*test_recompute.py:\d+ in"
    ):
        out.sum().backward()


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
    a, b = ab()
    runs, flag = iter([True, False]), torch.ones(2)

    def body(p, q):
        if next(runs):
            dist.all_reduce(flag)
        return (p @ q).sin()

    out = contexts(body, a, b, policy=save_all(), debug=True)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 2


@pytest.mark.parametrize(("forward", "again"), [(3, 2), (1, 0)])
def test_operator_that_is_missing_in_the_recomputation_is_an_error(forward, again):
    """A recomputation that ends early for want of operators names the one that is missing."""
    a, b = ab()
    runs = iter([forward, again])

    def body(p, q):
        for _ in range(next(runs)):
            p = p @ q
        return p.sin()

    out = contexts(body, a, b, policy=save_ops("aten.mm"))
    with pytest.raises(
        RecomputeError,
        match=rf"operator aten\.mm\.default ran {again} times in the recomputation .* "
        rf"{forward} times in the forward",
    ):
        out.sum().backward()


def test_more_calls_in_the_recomputation_are_an_error():
    """An operator that the forward did not run is reported with its count and line."""
    a, b = ab()
    times = iter([1, 2])

    def body(p, q):
        with torch.no_grad():
            for _ in range(next(times)):
                q @ p
        return (p @ q).sin()

    out = contexts(body, a, b, policy=PRODUCTS)
    with pytest.raises(RecomputeError, match=r"mm.default runs for the 3\. time .*ran it 2 times"):
        out.sum().backward()


@pytest.mark.parametrize("is_changed", [False, True])
def test_recomputation_outside_backward_leaves_no_hooks(is_changed):
    """Whoever reads a saved tensor of a node has it recomputed, or refused, and nothing more.

    In a backward the autograd engine puts back what a recomputation leaves; here nobody does.
    """
    a, b = ab()
    out = contexts(lambda p: (p.sin() + b).cos().sin(), a, policy=recompute_all())
    if is_changed:
        with torch.no_grad():
            b.add_(1)
        with pytest.raises(MutationError, match="changed in place after the region read it"):
            out.grad_fn._saved_self  # noqa: B018
    else:
        assert torch.equal(out.grad_fn._saved_self, (a.sin() + b).cos())
    assert saved_tensor_hooks() is None


def _nothing(ctx, op, *args, **kwargs):
    """A policy that looks at each call, so that calls are counted."""
    return CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_gradient_inside_a_region_is_counted_once_on_a_device(early_stop):
    """The region runs again for it on the device's backward thread, under the forward's mode."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    found = []
    for checkpointed in (False, True):
        a, b = (value.detach().to(device).requires_grad_() for value in ab())

        def body(p, q):
            z = (p @ q).sin()
            (inner,) = torch.autograd.grad(z.sum(), p, retain_graph=True)
            return (z @ inner.t()).cos().exp()

        given = a * 1.0
        out = (
            contexts(body, given, b, policy=_nothing, early_stop=early_stop)
            if checkpointed
            else body(given, b)
        )
        found.append(torch.autograd.grad(out.sum(), [a, b]))
    assert all(map(torch.equal, *found))
