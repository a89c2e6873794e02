"""Contexts engine: leaves that others write to between forward and backward are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies import MutationError, checkpoint, recompute_all, save_ops
from sac_policies.engines import _guards

from ._changes import UNSEEN


def _run(layer: nn.Module, x: torch.Tensor, change, policy) -> list[torch.Tensor]:
    out = checkpoint(lambda t: layer(t).tanh(), x, policy=policy, engine="contexts")
    with torch.no_grad():
        change()
    return list(torch.autograd.grad(out.sum(), [*layer.parameters(), x]))


@pytest.mark.parametrize("policy", [recompute_all(), save_ops("aten.addmm"), save_ops("aten.tanh")])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_changed_parameter_is_refused(name, policy):
    """A step of an optimizer between forward and backward is no silent wrong gradient."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(
        MutationError,
        match=r"sac_policies\.checkpoint: tensor of shape \(4.*\) was changed in place after the "
        r"region read it, but aten\..* of the recomputation reads it as it was \(read at .*\)\. "
        r"Change it after backward\.",
    ):
        _run(layer, x, lambda: getattr(layer, name).mul_(0.5), policy)


def test_changed_buffer_is_refused():
    """A tensor that needs no gradient is read again too."""
    scale, x = torch.ones(4), torch.ones(2, 4, requires_grad=True)
    out = checkpoint(lambda t: (t * scale).sin(), x, policy=recompute_all(), engine="contexts")
    scale.mul_(2)
    with pytest.raises(MutationError, match=r"shape \(4,\) was changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("train", [True, False])
def test_what_the_region_writes_itself_is_not_refused(train, equal):
    """Running statistics and counters change in the forward, and again in the recomputation."""
    x = torch.randn(8, 4, requires_grad=True)
    layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).train(train)
    found = _run(layer, x, lambda: None, recompute_all())
    wanted = torch.autograd.grad(layer(x).tanh().sum(), [*layer.parameters(), x])
    assert equal(found, list(wanted))
    layer(x)
    assert equal(_run(layer, x, lambda: layer(x) if train else None, recompute_all()), found)


def test_what_the_recomputation_does_not_reach_may_change(equal):
    """Only what is read again matters: the last bias of a region is not."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    shift = torch.zeros(4)

    def run(region: bool) -> list[torch.Tensor]:
        def function(t):
            return layer(t).tanh() + shift

        policy, engine = recompute_all(), "contexts"
        out = checkpoint(function, x, policy=policy, engine=engine) if region else function(x)
        shift.add_(1)
        return list(torch.autograd.grad(out.sum(), [*layer.parameters(), x]))

    assert equal(run(False), run(True))


def test_masks_of_a_recomputation_inside_the_forward_are_its_own(equal):
    """A gradient taken in the region recomputes what ran so far; nothing of that is refused."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

    def function(t):
        y = nn.functional.dropout(layer(t).sin(), 0.3)
        (inner,) = torch.autograd.grad(y.sum(), t, retain_graph=True)
        return y * inner

    results = []
    for region in (False, True):
        torch.manual_seed(0)
        out = (
            checkpoint(function, x, policy=recompute_all(), engine="contexts")
            if region
            else function(x)
        )
        results.append(list(torch.autograd.grad(out.sum(), [*layer.parameters(), x])))
    assert equal(*results)


class _Reads(nn.Module):
    """Reads leaves in many ways: x is (4, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.joined = nn.Parameter(torch.randn(1, width))
        self.aside = nn.Parameter(torch.randn(width, width))
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.linear(x), self.joined]).sin()
        y = (y * self.scale.view(1, -1)).tanh() @ self.aside.detach()
        return y.sin() @ y.new_ones(y.shape[1], 2)


def _reads_run(width: int, at: int, change, *, nested: bool = False, policy=None) -> list:
    torch.manual_seed(0)
    module = _Reads(width)
    x = torch.randn(4, width, requires_grad=True)
    leaves = [*module.parameters(), *module.buffers(), x]

    def region(t: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, t, policy=policy or recompute_all(), engine="contexts")

    def outer(t: torch.Tensor) -> torch.Tensor:
        return region(t.sin()).cos()

    run = outer if nested else region
    out = checkpoint(run, x, policy=save_ops("aten.cos"), engine="contexts") if nested else run(x)
    change(leaves[at])
    return list(torch.autograd.grad(out.sum(), [*module.parameters(), x], allow_unused=True))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("width", [8, 128])
@pytest.mark.parametrize("change", UNSEEN, ids=lambda change: change.__name__)
def test_what_no_version_counter_sees_is_refused(change, width, nested):
    """A write through `.data`, or a new `.data`, of parameters, buffers and inputs."""
    for at in range(6):
        with pytest.raises(
            MutationError,
            match=r"tensor of shape \(.*\) was changed after the region read it, but aten\..* of "
            r"the recomputation reads it as it was \(read at .*\)\. Change it after backward\.",
        ):
            _reads_run(width, at, change, nested=nested)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("width", [8, 128])
def test_unchanged_bits_are_not_refused(width, nested, equal):
    """Equal data in another place, as where a gathered parameter comes back, is as before."""

    def same(tensor: torch.Tensor) -> None:
        tensor.data = tensor.data.clone()

    wanted = _reads_run(width, 0, lambda tensor: None, nested=nested)
    for at in range(6):
        found = _reads_run(width, at, same, nested=nested)
        pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None]
        assert equal(*map(list, zip(*pairs, strict=True)))


def test_not_a_number_that_stays_is_not_refused():
    """Bits are compared, not numbers."""
    _reads_run(8, 1, lambda tensor: None)
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    layer.bias.data[0] = float("nan")
    _run(layer, x, lambda: None, recompute_all())


def test_what_only_kept_operators_read_may_change(equal):
    """Nothing reads the weight again: gradients are those of no checkpointing, which reads it."""
    results = []
    for region in (False, True):
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

        def function(t, layer=layer):
            return layer(t).tanh().sin()

        policy = save_ops("aten.addmm")
        out = checkpoint(function, x, policy=policy, engine="contexts") if region else function(x)
        layer.weight.data.mul_(0.5)
        results.append(list(torch.autograd.grad(out.sum(), [*layer.parameters(), x])))
    assert equal(*results)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_guards_hold_sums_on_devices_and_nothing_on_cpu(monkeypatch, nested, on_cpu):
    """Sums of rows of 127 words and of columns; a copy of a bias; none for values of the region."""
    monkeypatch.setattr(_guards, "is_immediate", lambda tensor: on_cpu)
    layer, x = nn.Linear(256, 256), torch.ones(2, 256, requires_grad=True)

    def function(t: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(256, 256).bernoulli_()
        return (layer(t).sin() @ mask).tanh()

    def outer(t: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, t, policy=recompute_all(), engine="contexts").cos()

    with _guards.noting() as made:
        run = outer if nested else function
        out = checkpoint(run, x, policy=recompute_all(), engine="contexts")
    held = [tensor for tensor in (ref() for ref in made) if tensor is not None]
    words = 256 * 256 * 4 // 8
    weight_bytes = (words // 127 + 127) * 8 + (words % 127) * 8
    # The weight, its bias, the input: each once, also where a region around reads them too.
    wanted = 0 if on_cpu else weight_bytes + 256 * 4 + 2 * 256 * 4
    assert sum(each.nbytes for each in held) == wanted
    out.sum().backward()


@pytest.mark.parametrize("width", [8, 128])
def test_what_an_early_stop_does_not_reach_may_change(width, equal):
    """The last product of a region is not run again; its own backward reads the weight as it is."""
    results = []
    for region in (False, True):
        torch.manual_seed(0)
        layer, x = nn.Linear(width, width), torch.ones(2, width, requires_grad=True)

        def function(t, layer=layer):
            return layer(t.sin())

        policy = recompute_all()
        out = checkpoint(function, x, policy=policy, engine="contexts") if region else function(x)
        layer.weight.data.mul_(0.5)
        results.append(list(torch.autograd.grad(out.sum(), [*layer.parameters(), x])))
    assert equal(*results)


def test_region_that_moves_its_parameters_is_not_guarded(equal):
    """What gathers a parameter in the region and frees it there does so again in backward."""
    layer, x = nn.Linear(64, 64), torch.ones(2, 64, requires_grad=True)
    whole = layer.weight.data

    def function(t: torch.Tensor) -> torch.Tensor:
        layer.weight.data = whole
        y = layer(t).sin()
        layer.weight.data = whole[:1]
        return y.tanh()

    wanted = torch.autograd.grad(layer(x).sin().tanh().sum(), x)
    out = checkpoint(function, x, policy=save_ops("aten.tanh"), engine="contexts")
    layer.weight.data = whole
    assert equal(list(torch.autograd.grad(out.sum(), x)), list(wanted))


def test_unchanged_small_leaves_cost_no_operator(counting):
    """On the CPU they are hashed; a change of one of them is still told by name."""
    layers = nn.ModuleList([nn.LayerNorm(6) for _ in range(6)])

    def function(t):
        for layer in layers:
            t = layer(t).sin()
        return t

    x = torch.randn(4, 6, requires_grad=True)
    out = checkpoint(function, x, policy=recompute_all(), engine="contexts")
    with counting() as counts:
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert counts["aten.equal.default"] == counts["aten.cat.default"] == 0
    layers[4].bias.data.add_(1)
    with pytest.raises(MutationError, match=r"shape \(6,\) was changed after .*native_layer_norm"):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    layers[4].bias.data.sub_(1)
    torch.autograd.grad(out.sum(), x)


def test_leaf_that_early_stop_does_not_reach_may_change(equal):
    """The recomputation ends before the last product, so nobody reads its bias again."""
    first, last, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)

    def function(t):
        return last(first(t).sin())

    wanted = torch.autograd.grad(function(x).sum(), [first.weight, x])
    out = checkpoint(function, x, policy=recompute_all(), engine="contexts")
    last.bias.data.add_(1)
    assert equal(list(torch.autograd.grad(out.sum(), [first.weight, x])), list(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
def test_sign_of_zero_is_a_change_and_no_number_is_none(dtype):
    """Bits are compared: zero is not minus zero, and what is not a number equals itself."""
    scale = torch.tensor([0.0, float("nan"), 2.0], dtype=dtype)
    x = torch.ones(3, dtype=dtype, requires_grad=True)

    def function(t):
        return (t * scale).exp()

    out = checkpoint(function, x, policy=recompute_all(), engine="contexts")
    torch.autograd.grad(out.abs().sum(), x, retain_graph=True)
    scale.data.copy_(torch.tensor([-0.0, float("nan"), 2.0], dtype=dtype))
    with pytest.raises(MutationError, match="was changed after the region read it"):
        torch.autograd.grad(out.abs().sum(), x)


@pytest.mark.parametrize("size", [6, 96])
def test_leaf_that_is_a_view_is_given_other_data(size):
    """Its base stays as it was; the leaf is not."""
    x = torch.linspace(-1, 1, size * size).reshape(size, size).requires_grad_()
    out = checkpoint(lambda t: t.sin().exp(), x, policy=recompute_all(), engine="contexts")
    x.data = x.data * 2
    with pytest.raises(MutationError, match="was changed after the region read it"):
        out.sum().backward()


def _products(t):
    return (t @ t).sin().abs()


@pytest.mark.parametrize(
    "lazily",
    [lambda t: t.conj(), lambda t: t.conj().imag],
    ids=["conjugated", "negated"],
)
def test_leaf_with_values_that_lie_otherwise_in_memory_is_read(lazily, equal):
    """Conjugated or negated only when it is read, it has the plain gradients."""
    values = torch.view_as_complex(torch.linspace(-1, 1, 32).reshape(4, 4, 2))
    grads = []
    for checkpoints in (False, True):
        leaf = lazily(values).requires_grad_()
        assert leaf.is_leaf
        assert leaf.is_conj() or leaf.is_neg()
        if checkpoints:
            out = checkpoint(_products, leaf, policy=recompute_all(), engine="contexts")
        else:
            out = _products(leaf)
        out.exp().sum().backward()
        grads.append(leaf.grad.resolve_conj().resolve_neg())
    assert equal(*([grad] for grad in grads))
