"""Eager regions: gradients, saved values and errors, for any saved operators."""

from __future__ import annotations

import gc
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from torchparts_conformance import requirement

aten = torch.ops.aten
PRODUCTS = [aten.mm.default]


def _everything(ctx, op, *args, **kwargs):
    return True


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def _leaves(device, count=2):
    torch.manual_seed(0)
    return [torch.randn(8, 8, device=device, requires_grad=True) for _ in range(count)]


def _gradients(function, *leaves):
    torch.manual_seed(1)
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def _products_in_backward(out):
    with _Counts() as counts:
        out.sum().backward()
    return counts.calls[aten.mm.default]


def _assert_equal(got, wanted):
    for left, right in zip(got, wanted, strict=True):
        assert torch.equal(left, right), (
            f"differ by {(left - right).abs().max()}, but must be equal"
        )


def _assert_equal_or_raises(part, body, policy, *leaves):
    try:
        got = _gradients(lambda *args: part.checkpoint(body, *args, policy=policy), *leaves)
    except RuntimeError:
        return
    _assert_equal(got, _gradients(body, *leaves))


@requirement(
    "SP-030",
    "In eager code, a product that a policy saves MUST NOT be run again in backward.",
    source="torch.utils.checkpoint.create_selective_checkpoint_contexts",
    quote="whether the execution of the op should be recomputed or not",
)
def test_saved_products_are_not_run_again(part, device):
    """With a saved product, backward runs two products."""
    a, b = _leaves(device)
    out = part.checkpoint(lambda p, q: (p @ q).sin().cos(), a, b, policy=PRODUCTS)
    assert _products_in_backward(out) == 2


@requirement(
    "SP-031",
    "A value with the decision to offload MUST NOT be recomputed instead.",
    rationale="pytorch#158657; MUST_CPU_OFFLOAD runs the operator again in eager on 2.13",
)
def test_offload_is_not_recomputing(part, device):
    """An offloaded product is copied back, not recomputed."""
    a, b = _leaves(device)
    offload = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", CheckpointPolicy.MUST_SAVE)

    def policy(ctx, op, *args, **kwargs):
        if op in PRODUCTS:
            return offload
        return CheckpointPolicy.PREFER_RECOMPUTE

    out = part.checkpoint(lambda p, q: (p @ q).sin().cos(), a, b, policy=policy)
    assert _products_in_backward(out) == 2


@requirement(
    "SP-032",
    "A policy that compares operators with packets, and therefore saves nothing, MUST cause a "
    "warning or an error.",
    rationale="pytorch#176065; reproduced on 2.13",
)
def test_packets_are_not_silently_ignored(part, device):
    """A policy that compares operators with a packet warns, raises or saves."""
    a, b = _leaves(device)

    def policy(ctx, op, *args, **kwargs):
        return op in [aten.mm]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out = part.checkpoint(lambda p, q: (p @ q).sin().cos(), a, b, policy=policy)
        except (TypeError, ValueError):
            return
    assert any("aten.mm" in str(each.message) for each in caught) or (
        _products_in_backward(out) == 2
    )


@requirement(
    "SP-033",
    "If a later operator of the region overwrites a saved value, gradients MUST be those without "
    "checkpointing, or an error MUST be raised.",
    rationale=(
        "pytorch#113737, pytorch#119590; silently wrong by 1.04 on 2.13 with "
        "allow_cache_entry_mutation"
    ),
)
def test_saved_value_overwritten_in_the_region(part, device):
    """selu_ overwrites a saved product."""
    a, b = _leaves(device)

    def body(p, q):
        return torch.selu_(p @ q).sin()

    _assert_equal_or_raises(part, body, PRODUCTS, a, b)


@requirement(
    "SP-034",
    "If some random operators are saved, the recomputed ones MUST still give the numbers of "
    "forward.",
    rationale="pytorch#121212; gradient wrong by 0.68 on 2.13",
)
@pytest.mark.parametrize("saved", [0, 1])
def test_random_operators_partly_saved(part, device, saved):
    """One of two random tensors is saved; the other keeps its numbers."""
    (a,) = _leaves(device, 1)

    def policy_of_a_run():
        seen = []

        def policy(ctx, op, *args, **kwargs):
            if op is not aten.rand_like.default:
                return False
            seen.append(op)
            return len(seen) - 1 == saved

        return policy

    def body(p):
        u, v = torch.rand_like(p.detach()), torch.rand_like(p.detach())
        return (p * u).sin() * v

    wanted = _gradients(body, a)
    _assert_equal(
        _gradients(lambda p: part.checkpoint(body, p, policy=policy_of_a_run()), a), wanted
    )


@requirement(
    "SP-035",
    "A second backward over a retained graph MUST give the same gradients.",
    rationale="raises on 2.13: trying to backward an extra time",
)
def test_second_backward_over_a_retained_graph(part, device):
    """A second backward gives the same gradients."""
    a, b = _leaves(device)
    out = part.checkpoint(lambda p, q: (p @ q).sin(), a, b, policy=PRODUCTS).sum()
    first = torch.autograd.grad(out, (a, b), retain_graph=True)
    _assert_equal(torch.autograd.grad(out, (a, b)), first)


@requirement(
    "SP-036",
    "A double backward through a region with saved values MUST give exact second derivatives.",
    rationale="raises on 2.13: trying to backward an extra time",
)
def test_double_backward(part, device):
    """Second derivatives are those of the plain function."""
    (a,) = _leaves(device, 1)

    def second(function):
        (first,) = torch.autograd.grad(function(a).sum(), a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), a)

    kept = second(lambda p: part.checkpoint(lambda q: (q @ q).sin(), p, policy=PRODUCTS))
    _assert_equal(kept, second(lambda p: (p @ p).sin()))


def _alive(shape):
    gc.collect()
    return sum(isinstance(x, torch.Tensor) and x.shape == shape for x in gc.get_objects())


@requirement(
    "SP-038",
    "The saved tensors of a region SHOULD be freed at the end of its backward, also if backward "
    "did not read them.",
    rationale="otherwise unused memory is missing in the next step",
)
def test_nothing_stays_cached_after_backward(part, device):
    """A saved value that backward never reads is freed at the end of backward."""
    a, b = _leaves(device)

    def body(p, q):
        return (p @ q).sin() @ q[:, :5]

    out = part.checkpoint(body, a, b, policy=PRODUCTS)
    out.sum().backward()
    assert _alive((8, 5)) == 1, "only the output itself may be alive"


@requirement(
    "SP-039",
    "Values that a policy saves MUST pass through saved-tensor hooks around the region.",
    rationale="pytorch#190581, pytorch#191205; hooks see only region inputs on 2.13",
)
def test_saved_values_pass_through_hooks(part, device):
    """Hooks around the region see the saved product, not only the inputs."""
    a, b = _leaves(device)
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        out = part.checkpoint(lambda p, q: (p @ q[:, :3]).sin(), a, b, policy=PRODUCTS)
    out.sum().backward()
    assert (8, 3) in shapes


@requirement(
    "SP-041",
    "Recomputing an outer region SHOULD NOT recompute values that an inner region saved.",
    rationale="pytorch#136433; 5 products instead of 4 on 2.13",
)
def test_outer_region_does_not_recompute_saved_inner_values(part, device):
    """Four products in backward: two gradients for each; the inner one is not recomputed."""
    a, b = _leaves(device)

    def inner(p, q):
        return part.checkpoint(lambda r, s: (r @ s).sin(), p, q, policy=PRODUCTS)

    out = part.checkpoint(lambda p, q: inner(p, q).cos() @ q, a, b, policy=[aten.sin.default])
    assert _products_in_backward(out) == 4


class _Mixture(nn.Module):
    """Two experts; each token goes to one of them; (tokens, 8) to (tokens, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x[:, None]))).flatten(1)


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out.square())


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return F.dropout(_Tanh.apply(self.linear(x)), 0.4)


@requirement(
    "SP-042",
    "In eager code, gradients MUST be bitwise those without checkpointing, whichever operators of"
    " a region are saved.",
    rationale="the promise of checkpointing",
)
@pytest.mark.parametrize("make", [_Mixture, _Convolution, _Custom])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_any_part_of_the_operators_saved(part, device, make, every):
    """Saving every operator, every second or every third changes no gradient."""
    torch.manual_seed(0)
    module = make().to(device)
    (x,) = _leaves(device, 1)

    def policy_of_a_run():
        seen = []

        def policy(ctx, op, *args, **kwargs):
            seen.append(op)
            return len(seen) % every == 0

        return policy

    def gradients(call):
        torch.manual_seed(1)
        return torch.autograd.grad(call(x).square().sum(), [x, *module.parameters()])

    wanted = gradients(module)
    kept = gradients(lambda t: part.checkpoint(module, t, policy=policy_of_a_run()))
    _assert_equal(kept, wanted)


@requirement(
    "SP-043",
    "If a policy function returns neither a CheckpointPolicy nor a bool, an error that names the "
    "operator MUST be raised.",
    rationale="None silently means recompute on 2.13",
)
def test_policy_that_returns_none_is_refused(part, device):
    """A policy that returns None raises an error that names the operator."""
    a, b = _leaves(device)
    with pytest.raises(Exception, match=r"aten\.mm"):
        part.checkpoint(torch.mm, a, b, policy=lambda ctx, op, *args, **kwargs: None)


@requirement(
    "SP-046",
    "If both a tensor and its view are saved and one is written to, gradients MUST be those "
    "without checkpointing, or an error MUST be raised.",
    rationale=(
        "pytorch#113737, pytorch#119590; on 2.13 a saved view no longer shares memory with its base"
    ),
)
@pytest.mark.parametrize("through", [True, False])
def test_saved_view_of_a_written_tensor(part, device, through):
    """Written through the view and read at the base, and the other way round."""
    a, b = _leaves(device)

    def body(p, q):
        y = p @ q
        rows = y.view(-1)
        (rows if through else y).mul_(2)
        return (y if through else rows).sin()

    _assert_equal_or_raises(part, body, _everything, a, b)


@requirement(
    "SP-044",
    "Two backwards over disjoint outputs of a region MUST both work.",
    rationale="raises on 2.13; works without a policy",
)
def test_backwards_over_disjoint_outputs(part, device):
    """Each of two outputs can be differentiated separately."""
    a, b = _leaves(device)

    def body(p, q):
        return (p @ q).sin(), (q @ p).cos()

    wanted = [torch.autograd.grad(each.sum(), (a, b)) for each in body(a, b)]
    kept = part.checkpoint(body, a, b, policy=PRODUCTS)
    for each, right in zip(kept, wanted, strict=True):
        _assert_equal(torch.autograd.grad(each.sum(), (a, b)), right)
