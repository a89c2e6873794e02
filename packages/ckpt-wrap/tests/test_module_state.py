"""Buffers that forward reads and writes: recomputation reads their values from before forward."""

from __future__ import annotations

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from ckpt_wrap import ModuleError, RecomputeError, checkpoint_, is_recomputing

LARGE = 1 << 17  # numel above which a buffer is copied only if it is known to be written


class Layer(nn.Module):
    """A linear layer with a buffer; each test defines how forward uses the buffer."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.register_buffer("b", torch.zeros(features))

    def forward(self, x):
        y = self.use(self.l(x))
        return torch.tanh(y) * y

    def use(self, y):
        raise NotImplementedError


class AddThenRead(Layer):
    def use(self, y):
        self.b.add_(1)
        return y + self.b


class ReadThenAdd(Layer):
    def use(self, y):
        y = y + self.b
        self.b.add_(1)
        return y


class Centre(Layer):
    """A moving average, as in DINO."""

    def use(self, y):
        centred = y - self.b
        with torch.no_grad():
            self.b.lerp_(y.mean(0), 0.1)
        return centred


class Rebound(Layer):
    def use(self, y):
        y = y + self.b
        self.b = self.b * 0.9 + 1
        return y


class FromNone(Layer):
    """A cache created by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None)

    def use(self, y):
        scale = 1.0 if self.cache is None else 2.0
        self.cache = y.detach().mean(0)
        return y * scale + self.cache


class ThroughData(Layer):
    def use(self, y):
        y = y + self.b
        self.b.data += 1
        return y


class Large(Layer):
    """Has a buffer that is copied only if it is known to be written."""

    def __init__(self) -> None:
        super().__init__(LARGE)

    def use(self, y):
        y = y + self.b[:8]
        self.b.add_(1)
        return y


class Tied(Layer):
    """One buffer under two names: written by one name, read by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.l.register_buffer("same", self.b)

    def use(self, y):
        self.b.add_(1)
        return y + self.l.same


class GuardsAnother(Layer):
    """Guards counters that it does not read, and contains a layer that writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Centre()
        self.steps = 0

    def use(self, y):
        if not is_recomputing():
            self.steps += 1
            self.b.add_(len(y))
        return self.inner(y)


def spectral():
    """Spectral norm: each forward advances the vectors of the power iteration."""
    return nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh())


def batch_norm():
    """Batch norm with a cumulative average, which is read before it is written."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh())


MODULES = [
    AddThenRead,
    ReadThenAdd,
    Centre,
    Rebound,
    FromNone,
    ThroughData,
    Large,
    Tied,
    GuardsAnother,
    spectral,
    batch_norm,
]


def results(module, *, steps=3, calls=1, backwards=1):
    """Gradients and buffers after each step; several forwards precede one backward."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        xs = [torch.randn(6, 8, requires_grad=True) for _ in range(calls)]
        loss = sum((module(x) ** 2).sum() for x in xs)
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        found += [x.grad for x in xs]
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found += [b.clone() for b in module.buffers()]
    return found


def assert_same(found, expected, tolerance=0):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "how"),
    [({}, {}), ({"early_stop": False}, {}), ({}, {"backwards": 2}), ({}, {"calls": 3})],
    ids=str,
)
@pytest.mark.parametrize("make", MODULES)
def test_buffers_that_forward_writes_are_read_as_they_were(make, options, how, wrap):
    """Gradients and buffers match the plain module, and each call updates the buffers once."""
    plain = make()
    wrapped = wrap(copy.deepcopy(plain), **options)
    # The gradients of several calls are summed in another order.
    tolerance = 1e-5 if "calls" in how else 0
    assert_same(results(wrapped, **how), results(plain, **how), tolerance)


@pytest.mark.parametrize("make", MODULES)
def test_nested_modules_read_buffers_as_they_were(make):
    """In nested checkpoints, the forward of the inner module runs twice."""
    plain = nn.Sequential(ReadThenAdd(), nn.Sequential(make(), Centre()), ReadThenAdd())
    wrapped = copy.deepcopy(plain)
    checkpoint_(wrapped[1][0])
    checkpoint_(wrapped)
    assert_same(results(wrapped), results(plain))


class Fails(ReadThenAdd):
    fails = False  # a class attribute: attributes of the module must not change before backward

    def forward(self, x):
        result = super().forward(x)
        if self.fails:
            raise ValueError("told to")
        return result


@pytest.mark.parametrize("fails", [False, True])
def test_recomputation_leaves_the_very_tensors(fails, wrap, monkeypatch):
    """Buffers after backward are the same objects as before and were not written."""
    wrapped = wrap(Fails())
    for _ in range(2):
        monkeypatch.setattr(Fails, "fails", False)
        with set_checkpoint_early_stop(False):
            loss = wrapped(torch.randn(2, 8, requires_grad=True)).sum()
        before = list(wrapped.buffers())
        versions = [b._version for b in before]
        monkeypatch.setattr(Fails, "fails", fails)
        with pytest.raises(ValueError, match="told to") if fails else contextlib.nullcontext():
            loss.backward()
        assert all(a is b for a, b in zip(before, wrapped.buffers(), strict=True))
        assert [b._version for b in before] == versions


def test_recomputation_leaves_out_a_guarded_write(wrap):
    """A guarded buffer keeps its old value, so the same forward must not read it."""

    class GuardedAndRead(AddThenRead):
        def use(self, y):
            if not is_recomputing():
                self.b.add_(1)
            seen.append(self.b[0].item())
            return y + self.b

    seen = []
    inner = GuardedAndRead()
    wrap(inner)(torch.ones(2, 8)).sum().backward()
    assert seen == [1.0, 0.0]


class LargeIntegers(Large):
    def __init__(self) -> None:
        super().__init__()
        self.b = self.b.long()


class WritesLater(Large):
    """Writes its large buffer only from the second call on."""

    calls = 0

    def use(self, y):
        self.calls += 1
        return super().use(y) if self.calls > 1 else y + self.b[:8]


class SkippedFirst(nn.Module):
    """Has a layer that the first call skips; its statistics have no version counter."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.norm = norm
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.l(x)
        return torch.tanh(self.norm(y) if self.calls > 1 else y)


LATER = [
    lambda: nn.Sequential(WritesLater()),
    lambda: SkippedFirst(nn.BatchNorm1d(8)),
    lambda: SkippedFirst(nn.InstanceNorm1d(6, track_running_stats=True)),
]


@pytest.mark.parametrize("make", LATER)
def test_a_first_write_may_come_in_a_later_call(make, wrap):
    """The first call does not show which buffers are written."""
    plain = make()
    wrapped = wrap(copy.deepcopy(plain))
    assert_same(results(wrapped), results(plain))


class InPlace(nn.Module):
    """Writes a large tensor in a plain attribute in place."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.mean = torch.zeros(LARGE)

    def forward(self, x):
        y = self.l(x) + self.mean[:8]
        self.mean.add_(1)
        return torch.tanh(y) * y


def _runs(module):
    """Count the forwards of its linear layers, recomputations included."""
    counted = []
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda module, args: counted.append(1))
    return counted


@pytest.mark.parametrize("make", [Large, LargeIntegers, InPlace])
@pytest.mark.parametrize("training", [True, False])
def test_the_first_write_to_a_large_tensor_keeps_what_is_saved(make, training, wrap):
    """That call cannot be repeated; later calls copy the tensor, and are."""
    plain = nn.Sequential(make()).train(training)
    wrapped = wrap(copy.deepcopy(plain))
    counted = _runs(wrapped)
    for runs in (1, 3, 5):
        assert_same(results(wrapped, steps=1), results(plain, steps=1))
        assert len(counted) == runs


def test_a_large_buffer_that_forward_reads_is_not_copied(wrap):
    """Nor is what the call saves kept after forward."""

    class Reads(Layer):
        def __init__(self) -> None:
            super().__init__(LARGE)

        def use(self, y):
            return torch.sin(y * self.b[:8])

    wrapped = wrap(Reads())
    counted = _runs(wrapped)
    x = torch.randn(2, 8, requires_grad=True)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        loss = wrapped(x).sum()
    clones = [event.input_shapes for event in profile.events() if event.name == "aten::clone"]
    assert not [shapes for shapes in clones if shapes[0] == [LARGE]]
    loss.backward()
    assert len(counted) == 2


def test_a_tensor_that_a_call_keeps_is_refused_when_changed(wrap):
    """As it is by a plain module."""
    inner = []

    class Exposes(Large):
        def use(self, y):
            inner.append(torch.exp(y))
            return super().use(inner[0])

    loss = wrap(Exposes())(torch.randn(2, 8, requires_grad=True)).sum()
    with torch.no_grad():
        inner[0].add_(1)
    with pytest.raises(
        RecomputeError, match=r"a tensor that module .*Exposes.* saved has been mod"
    ):
        loss.backward()


class Kept(TorchDispatchMode):
    """Counts clones."""

    clones = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.clones += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_copies_are_not_seen_by_modes_around_the_call(wrap):
    """Selective contexts and operator counters see only the module's operators."""
    wrapped = wrap(ReadThenAdd())
    with Kept() as mode:
        wrapped(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert mode.clones == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_buffers_of_scripted_layers_stay_where_torch_script_has_them(wrap):
    """They can be read from Python, but not replaced for one call."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Tanh())
    scripted = copy.deepcopy(plain)
    scripted[1] = torch.jit.script(scripted[1])
    assert_same(results(wrap(scripted)), results(plain))


def test_a_backward_inside_forward_reads_buffers_as_they_were(wrap):
    """It recomputes before forward ends; its own graph is recomputed later."""

    class Inside(ReadThenAdd):
        def forward(self, x):
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y * slope

    plain = Inside()
    wrapped = wrap(copy.deepcopy(plain))
    assert_same(results(wrapped), results(plain))


def test_a_compiled_module_inside_reads_buffers_as_they_were():
    """Forward and recomputation run the same compiled code."""
    plain = nn.Sequential(ReadThenAdd())
    wrapped = copy.deepcopy(plain)
    wrapped[0].compile(backend="eager", fullgraph=True)
    checkpoint_(wrapped)
    assert_same(results(wrapped), results(plain))


class Many(nn.Module):
    """Reads some layers of a long list, in several ways, and changes the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReadThenAdd() for _ in range(9))
        self.extra = nn.Linear(8, 8)
        self.fails = False

    def forward(self, x):
        x = self.layers[1](x)
        if self.fails:
            raise ValueError("told to")
        for layer in self.layers[2:4]:
            x = layer(x)
        if len(self.layers) == 9:
            self.layers.append(self.extra)
        return self.layers.get_submodule("5")(x) + self.layers[9](x)


@pytest.mark.filterwarnings("ignore:.*becomes one region")
def test_submodules_of_a_long_list_are_put_back(wrap):
    """The list has its own dict again, with what forward appended, also after an error."""
    plain = Many()
    inner = copy.deepcopy(plain)
    wrapped = wrap(inner)
    for _ in range(2):
        assert_same(results(wrapped), results(plain))
        assert type(inner.layers._modules) is type(plain.layers._modules)
        assert list(inner.layers._modules) == list(plain.layers._modules)
    inner.fails = True
    with pytest.raises(ValueError, match="told to"):
        wrapped(torch.ones(2, 8))
    assert type(inner.layers._modules) is type(plain.layers._modules)
    inner.fails, inner.last = False, nn.LazyLinear(8)
    with pytest.raises(ModuleError):
        wrapped(torch.ones(2, 8))
    assert type(inner.layers._modules) is type(plain.layers._modules)


@pytest.mark.filterwarnings("ignore:.*becomes one region")
def test_nested_regions_share_a_long_list(wrap):
    """The outer region records what the inner one reads."""
    plain = nn.Sequential(Many(), nn.Linear(8, 8))
    wrapped = copy.deepcopy(plain)
    wrapped[0] = wrap(wrapped[0])
    assert_same(results(wrap(wrapped)), results(plain))


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm1d, partial(nn.LazyLinear, 8)])
def test_a_lazy_layer_without_values_is_refused(wrap, lazy):
    """Its first forward creates the values; after a call without gradients, it is accepted."""
    module = wrap(nn.Sequential(nn.Linear(8, 8), lazy(), nn.Tanh()))
    with pytest.raises(ModuleError, match=r"Run one forward under torch\.no_grad"):
        module(torch.ones(2, 8))
    with torch.no_grad():
        module(torch.ones(2, 8))
    module(torch.ones(2, 8)).sum().backward()
