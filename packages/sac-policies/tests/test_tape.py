"""The tape: replayed values, held values, and operators that it ignores."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from sac_policies import (
    RecomputeError,
    checkpoint,
    checkpoint_name,
    context_fn,
    first_match,
    offload,
    recompute_all,
    recompute_ops,
    save_all,
    save_by_bytes,
    save_by_flops,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    scoped,
)
from sac_policies._torch_compat import saved_tensor_hooks, storage_key
from sac_policies.policies import save_by_index
from sac_policies.policies._decisions import Decision

NOTHING = recompute_all()
UNCHECKED: Any = {"determinism_check": "none"}
POLICIES = [NOTHING, save_ops("aten.mm"), save_all()]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["nothing", "mm", "all"])


def taped(function: Any, *args: Any, policy: Any = NOTHING, **kwargs: Any) -> Any:
    """Call a function as a region of the tape engine."""
    return checkpoint(function, *args, policy=policy, **kwargs)


def leaf(*shape: int) -> torch.Tensor:
    """Make an input."""
    return torch.randn(*shape, requires_grad=True)


@pytest.fixture
def xw() -> tuple[torch.Tensor, torch.Tensor]:
    """Give an input and a weight, 8 x 8."""
    torch.manual_seed(0)
    return leaf(8, 8), leaf(8, 8)


def grads(out: torch.Tensor, *inputs: torch.Tensor) -> list[Any]:
    """Return the gradients of the squared output."""
    return list(torch.autograd.grad(out.float().square().sum(), inputs, allow_unused=True))


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists of gradients are bit-identical."""
    return all(a is b is None or torch.equal(a, b) for a, b in zip(left, right, strict=True))


def agrees(function: Any, x: torch.Tensor, *others: torch.Tensor, policy: Any = NOTHING) -> bool:
    """Whether a function of x has equal gradients plainly and under the tape."""
    torch.manual_seed(1)
    plain = grads(function(x), x, *others)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    found = grads(taped(function, x, policy=policy), x, *others)
    return same([*plain, drawn], [*found, torch.rand(1)])


def held_bytes(out: torch.Tensor, *outside: torch.Tensor) -> int:
    """Bytes of live tensors, each storage once, without the output and excluded tensors."""
    known = {storage_key(each) for each in (out, *outside)}
    found = {}
    for each in gc.get_objects():
        # isinstance would read `__class__` of every object, and some warn about that.
        if issubclass(type(each), torch.Tensor) and not issubclass(type(each), nn.Parameter):
            key = storage_key(each)
            if key not in known:
                found[key] = each.untyped_storage().nbytes()
    return sum(found.values())


# Gradients


def test_write_through_separate_counter_is_bit_identical(xw):
    """Parts of unsafe_chunk have separate version counters, so plain autograd is wrong."""
    x, w = xw

    def run(t):
        y = t * 2
        with torch.no_grad():
            part = torch.unsafe_chunk(y, 2)[0]
        z = y.sin() @ w
        with torch.no_grad():
            part.add_(1)
        return z * y.cos()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        expected = run(x)
    assert same(grads(taped(run, x), x, w), grads(expected, x, w))


def test_autocast_around_backward_has_no_effect_on_replays(xw):
    """Its own operators are cast, as without a region."""
    x, w = xw
    found = []
    for region in (lambda function, t: function(t), taped):
        out = region(lambda t: ((t @ w).sin() @ w).cos(), x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(list(torch.autograd.grad(out, (x, w))))
    assert same(*found)


def test_deep_chain_does_not_recurse(xw):
    """5,000 operators between two saved tensors."""
    x, w = xw

    def run(t):
        for _ in range(5000):
            t = t + 1e-4
        return t.sin() * w

    assert agrees(run, x, w)


def test_inference_tensor_is_read_again(xw):
    """It has no version counter."""
    x, w = xw
    with torch.inference_mode():
        constant = torch.randn(8, 8)
    assert agrees(lambda t: (t + constant).sin() * w, x, w)


# Python, random numbers, integers


@every_policy
def test_random_operators_draw_once(xw, policy):
    """Dropout, noise and attention with dropout; the random state matches a plain run."""
    x, w = xw

    def run(t):
        y = F.dropout(t @ w, 0.5) + torch.randn_like(t) * t
        q = y.view(1, 2, 8, 4)
        return F.scaled_dot_product_attention(q, q.cos(), q.sin(), dropout_p=0.1).view(8, 8)

    assert agrees(run, x, w, policy=policy)


@every_policy
def test_noise_is_saved_before_it_is_written(policy):
    """pytorch#193671: `rrelu` saves its noise, and its kernel fills it after that."""
    x, w = leaf(32, 64), leaf(64, 64)
    assert agrees(lambda t: F.rrelu(t @ w, training=True) @ w, x, w, policy=policy)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_mask_is_held_as_bits(inplace):
    """One bit per element."""
    x = leaf(64, 64)
    gc.collect()
    before = held_bytes(x)
    torch.manual_seed(1)
    out = taped(lambda t: F.dropout(t * 1.0, 0.3, inplace=inplace).sin(), x, **UNCHECKED)
    gc.collect()
    assert held_bytes(out, x) - before <= 64 * 64 // 8 + 64
    torch.manual_seed(1)
    assert same(grads(out, x), grads(F.dropout(x, 0.3).sin(), x))


# Changes after the region


def test_data_replaced_in_region_is_noticed(xw):
    """`y.data = other` changes only the bits."""
    x, w = xw

    def run(t):
        y = t.sin() * w
        z = y.cos()
        y.data = torch.ones(8, 8)
        return z + y.exp() * w

    with pytest.raises(RecomputeError):
        grads(taped(run, x), x, w)


@pytest.mark.parametrize("policy", [save_all(), recompute_all()], ids=["save", "recompute"])
def test_constant_replaced_by_data_keeps_its_bits(xw, policy):
    """Backward reads a constant twice: after it was saved, and after it was known."""
    x, _ = xw
    scale, expected = torch.full((8,), 1.25), grads(x * 1.25 * 1.25, x)
    out = taped(lambda t: t * scale * scale, x, policy=policy)
    scale.data = scale * 0.5
    assert same(grads(out, x), expected)


# Nesting


def test_hooks_around_region_get_what_is_held(xw):
    """Replays use the tensors that the hooks return."""
    x, w = xw
    packed, unpacked = [], []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    def unpack(t):
        unpacked.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = taped(lambda t: ((t @ w).sin() @ w).cos(), x, policy=save_ops("aten.mm"))
    assert len(packed) == 4  # x, w, and both matmuls
    assert same(grads(out, x, w), grads(((x @ w).sin() @ w).cos(), x, w))
    assert len(unpacked) >= 4


def test_region_between_hooks_of_a_region_is_right(xw):
    """User hooks between two regions give the inner region a separate tape."""
    x, w = xw

    def run(t):
        with torch.autograd.graph.save_on_cpu():
            return taped(lambda u: (u @ w).sin(), t.exp()).cos()

    assert agrees(run, x, w)


# Exceptions and memory


@pytest.mark.parametrize(
    "around",
    [
        noop_context_fn,
        context_fn(save_ops("aten.mul")),
        lambda: (torch.autocast("cpu"), nullcontext()),
    ],
    ids=["hooks", "modes", "autocast"],
)
def test_held_error_of_checkpoints_of_torch_leaves_nothing(around):
    """While the error is held, their hooks and modes are left too, the innermost first."""
    x = torch.ones(2, 2, requires_grad=True)

    def fail(t):
        raise KeyError(t @ t)

    inside = partial(torch_checkpoint, use_reentrant=False, context_fn=around)
    with pytest.raises(KeyError) as held:
        taped(partial(inside, partial(inside, fail)), x)
    assert saved_tensor_hooks() is None
    assert _get_current_dispatch_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")
    assert held.traceback


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_are_freed_without_collector(xw, policy, no_collector):
    """After backward, and if the output is dropped without a backward."""
    x, w = xw
    alive = []

    def run(t):
        y = (t @ w).sin()
        alive.append(weakref.ref(y))
        return (y.cos() @ w).tanh()

    taped(run, x, policy=policy).sum().backward()
    taped(run, x, policy=policy)
    assert [each() for each in alive] == [None, None]
    assert not (x.__dict__ or w.__dict__)


def test_partial_backward_leaves_nothing_cached(xw):
    """Values cached for a backward that did not run are dropped with it."""
    x, w = xw

    def run(t):
        y = t.sin()
        return y @ w, y.cos() @ w

    a, b = taped(run, x, **UNCHECKED)
    gc.collect()
    before = held_bytes(a, b, x, w)
    for _ in range(2):
        torch.autograd.grad(a.sum(), w, retain_graph=True)
        gc.collect()
        assert held_bytes(a, b, x, w) <= before


# Policies


class Two(nn.Module):
    """Two layers with an activation after each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16, bias=False)
        self.last = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        """Apply them."""
        h = checkpoint_name(self.first(x), "hidden").sin().cos()
        return self.last(h).sin().cos()


MM = "aten.mm.default"


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        (NOTHING, 8),
        (save_ops("aten.mm"), 6),
        (offload("aten.mm"), 6),
        (["aten.mm"], 6),
        (save_ops("aten.m?"), 6),
        ({"aten.mm": "save"}, 6),
        ({"first :: aten.mm": "save"}, 7),
        (lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default, 6),
        (save_modules("last"), 7),
        (scoped(save_ops("aten.mm"), "first"), 7),
        (save_every_nth("aten.mm", n=2), 7),
        (save_by_bytes(at_least=8 * 16 * 4), 7),
        (save_by_flops(at_least=1), 6),
        (save_named("hidden"), 7),
        (save_by_index({(MM, 1): Decision.SAVE}), 7),
        (first_match(recompute_ops("aten.mm"), save_all()), 8),
        (save_ops("aten.mm") & ~save_modules("first"), 7),
    ],
)
def test_policy_decides_which_matmuls_run_again(policy, runs, counting):
    """Two in forward, four in backward, and one more for each matmul that is not kept."""
    module, x = Two(), leaf(8, 8)
    with counting() as counts:
        found = grads(taped(module, x, policy=policy), x, *module.parameters())
    assert counts[MM] == runs
    assert same(found, grads(module(x), x, *module.parameters()))


def test_policy_of_a_nested_region_ends_with_it(xw, counting):
    """The outer policy keeps the matmuls before and after; the inner one is recomputed."""
    x, w = xw

    def run(t):
        return (taped(lambda u: (u @ w).sin(), (t @ w).sin()) @ w).sin()

    out = taped(run, x, policy=save_ops("aten.mm"))
    with counting() as counts:
        out.sum().backward()
    assert counts[MM] == 6 + 1


def test_gradient_inside_region_keeps_what_backward_reads(xw, counting):
    """Both matmuls, the region's and its gradient's, are kept, so backward runs neither."""
    x, w = xw

    def run(t):
        h = (t @ w).sin()
        (g,) = torch.autograd.grad(h.sum(), t)
        return h.detach() * g.cos() * t.exp()

    out = taped(run, x, policy=save_ops("aten.mm"))
    with counting() as counts:
        out.sum().backward()
    assert counts[MM] == 0


class _Made(TorchDispatchMode):
    """Notes the results of multiplications with a number, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and not isinstance(args[1], torch.Tensor):
            self.seen.append(weakref.ref(out))
        return out


def test_open_region_frees_a_replayed_value_after_each_read(xw, no_collector):
    """A later reader in the same backward replays it again: memory of the region stays its own."""
    x, _ = xw
    made, alive = _Made(), []

    def run(t):
        h = t * 2
        sine = h.sin()
        sine.register_hook(lambda grad: alive.append([each() is not None for each in made.seen]))
        later = h.cos()
        del h
        with made:
            torch.autograd.grad((sine + later).sum(), t, retain_graph=True)
        return sine + later

    taped(run, x).sum().backward()
    assert alive[0] == [False] * len(alive[0])
    assert len(alive[0]) >= 1


class _RMSNorm(nn.Module):
    """Divides rows of 64 by their root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))) @ x.T


def test_much_smaller_result_of_a_reduction_is_not_replayed(counting):
    """The square and the mean of a norm; what is as large as the input is replayed."""
    module, x = _RMSNorm(), leaf(8, 64)
    plain = grads(module(x), x, module.weight)
    out = taped(module, x)
    with counting() as counts:
        found = grads(out, x, module.weight)
    assert same(found, plain)
    assert counts["aten.mean.dim"] == 0
    assert counts["aten.rsqrt.default"] == 1


@pytest.mark.parametrize("hooks", [False, True], ids=["alone", "inside hooks"])
def test_view_of_a_held_tensor_is_held_and_not_replayed(xw, counting, hooks):
    """Hooks around the region get its base instead, once, and the view is replayed."""
    x, w = xw
    packed = []

    def pack(t):
        packed.append(t)
        return t

    def run(t):
        return t.T.sin() + t.T.cos() @ w.T

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t) if hooks else nullcontext():
        out = taped(run, x)
    with counting() as counts:
        found = grads(out, x, w)
    plain = run(x)
    with counting() as plainly:
        assert same(found, grads(plain, x, w))
    assert len(packed) == (2 if hooks else 0)
    again = counts["aten.permute.default"] - plainly["aten.permute.default"]
    assert again == (3 if hooks else 0)


# Other tensors and operators


def test_forward_derivative_through_region(xw):
    """Dual tensors pass through a region."""
    x, w = xw
    found = []
    for run in (taped, lambda function, t: function(t)):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones(8, 8))
            out = torch.autograd.forward_ad.unpack_dual(run(lambda t: (t @ w).sin(), dual))
            found.append([out.tangent.detach(), *grads(out.primal, x, w)])
    assert same(*found)


def test_saved_tensors_are_readable_outside_backward(xw):
    """`grad_fn._saved_*` unpacks a value and caches nothing."""
    x, w = xw
    out = taped(lambda t: (t @ w).exp().sin(), x)
    assert torch.equal(out.grad_fn._saved_self, (x @ w).exp())


def test_running_collective_ends_before_its_bits_are_read(xw, monkeypatch):
    """Autograd saves an asynchronous result before an operator waits for it."""
    x, _ = xw
    memory = torch.zeros(8, 8)

    def finish(tensor: AsyncCollectiveTensor) -> torch.Tensor:
        memory.numpy()[...] = 2.0
        return tensor.elem

    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", finish)
    made = AsyncCollectiveTensor(memory)
    out = taped(lambda t: (t * made.view(8, 8)).sum(), x, policy=offload("aten.mul"))
    assert torch.equal(torch.autograd.grad(out, x)[0], torch.full((8, 8), 2.0))
