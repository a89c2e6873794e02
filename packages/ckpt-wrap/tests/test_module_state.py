"""Buffers that forward reads and writes: the second run reads them as the first one found them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from ckpt_wrap import (
    ModuleError,
    RecomputeError,
    checkpoint_,
    is_recomputing,
)

from ._buffer_modules import (
    LARGE,
    MODULES,
    Centre,
    Large,
    ReadThenAdd,
    Rebound,
)


def results(module, *, steps=3, calls=1, backwards=1):
    """Gradients and buffers after each step; several calls are made before one backward."""
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


def assert_same(found, expected):
    """Bitwise, with NaN equal to NaN."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", [{}, {"backwards": 2}], ids=str)
@pytest.mark.parametrize("make", MODULES)
def test_buffers_that_forward_writes_are_read_as_they_were(make, how, wrap):
    """Gradients and buffers are bitwise the plain module's, and the buffers advance once."""
    plain = make()
    wrapped = wrap(copy.deepcopy(plain))
    assert_same(results(wrapped, **how), results(plain, **how))


@pytest.mark.parametrize("make", MODULES)
def test_each_of_several_calls_reads_buffers_as_it_found_them(make, wrap):
    """All before one backward."""
    plain = make()
    wrapped = wrap(copy.deepcopy(plain))
    found, expected = results(wrapped, calls=3), results(plain, calls=3)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("make", MODULES)
def test_buffers_are_the_same_where_the_second_run_goes_to_its_end(make):
    """Without early stop."""
    plain = make()
    wrapped = checkpoint_(copy.deepcopy(plain), early_stop=False)
    assert_same(results(wrapped), results(plain))


@pytest.mark.parametrize("make", MODULES)
def test_nested_modules_read_buffers_as_they_were(make):
    """A checkpointed module inside another: the inner one's first run happens twice."""
    plain = nn.Sequential(ReadThenAdd(), nn.Sequential(make(), Centre()), ReadThenAdd())
    wrapped = copy.deepcopy(plain)
    checkpoint_(wrapped[1][0])
    checkpoint_(wrapped)
    assert_same(results(wrapped), results(plain))


def test_the_second_run_leaves_the_very_tensors(wrap):
    """The buffers after backward are the objects from before it, and were not written."""
    wrapped = wrap(ReadThenAdd())
    for _ in range(2):
        loss = wrapped(torch.randn(2, 8, requires_grad=True)).sum()
        before = list(wrapped.buffers())
        versions = [b._version for b in before]
        loss.backward()
        assert all(a is b for a, b in zip(before, wrapped.buffers(), strict=True))
        assert [b._version for b in before] == versions


class Fails(ReadThenAdd):
    fails = False  # of the class: the attributes of a module must not change before backward

    def forward(self, x):
        result = super().forward(x)
        if self.fails:
            raise ValueError("told to")
        return result


def test_a_second_run_that_fails_leaves_the_very_tensors(wrap, monkeypatch):
    """An exception passes, and the next step is right."""
    wrapped = wrap(Fails())
    inner = next(m for m in wrapped.modules() if isinstance(m, Fails))
    with set_checkpoint_early_stop(False):
        loss = wrapped(torch.randn(2, 8, requires_grad=True)).sum()
        before = inner.b
        monkeypatch.setattr(Fails, "fails", True)
        with pytest.raises(ValueError, match="told to"):
            loss.backward()
    assert inner.b is before
    assert torch.equal(before, torch.ones(8))


class LargeIntegers(Large):
    def __init__(self) -> None:
        super().__init__()
        self.b = self.b.long()


class WritesLater(Large):
    """Writes its large buffer from the second call on."""

    calls = 0

    def use(self, y):
        self.calls += not is_recomputing()
        return super().use(y) if self.calls > 1 else y + self.b[:8]


def test_a_first_write_may_come_later(wrap):
    """A buffer of a module in training mode is copied before each forward."""
    plain = nn.Sequential(WritesLater())
    wrapped = wrap(copy.deepcopy(plain))
    assert_same(results(wrapped), results(plain))


@pytest.mark.parametrize("make", [Large, LargeIntegers])
def test_a_large_buffer_that_is_not_copied_is_refused_if_written(make, wrap):
    """One that is written in evaluation, or that holds integers; a small one is copied."""
    wrapped = wrap(nn.Sequential(make())).train(make is LargeIntegers)
    with pytest.raises(
        RecomputeError,
        match=r"buffer '0\.b' of module .*Sequential.* was changed in place by its own forward, "
        r"and recomputation needs it as it was before\. Large buffers are copied",
    ):
        wrapped(torch.randn(2, 8, requires_grad=True)).sum().backward()


class Kept(TorchDispatchMode):
    """Counts clones."""

    clones = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.clones += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_copies_are_not_seen_by_modes_around_the_call(wrap):
    """Selective contexts and counters see the operators of the module only."""
    wrapped = wrap(ReadThenAdd())
    with Kept() as mode:
        wrapped(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert mode.clones == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_buffers_of_scripted_layers_stay_where_torch_script_has_them(wrap):
    """They can be read from Python, but none can be put in for one call."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Tanh())
    scripted = copy.deepcopy(plain)
    scripted[1] = torch.jit.script(scripted[1])
    assert_same(results(wrap(scripted)), results(plain))


class SkippedFirst(nn.Module):
    """Layers that the first call does not reach."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.norm = norm
        self.calls = 0

    def forward(self, x):
        self.calls += not is_recomputing()
        y = self.l(x)
        return torch.tanh(self.norm(y) if self.calls > 1 else y)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.InstanceNorm1d(6, track_running_stats=True)], ids=repr
)
def test_statistics_that_are_first_written_later_advance_once(norm, wrap):
    """They count no version, and the first call has not shown that they are written."""
    plain = SkippedFirst(copy.deepcopy(norm))
    wrapped = wrap(copy.deepcopy(plain))
    assert_same(results(wrapped), results(plain))


def test_a_backward_inside_forward_reads_buffers_as_they_were():
    """The first run has not ended when its second one happens."""

    class Inside(ReadThenAdd):
        def forward(self, x):
            y = super().forward(x)
            self.grad = torch.autograd.grad(y.sum(), self.l.weight, retain_graph=True)[0]
            return y

    plain = Inside()
    wrapped = checkpoint_(copy.deepcopy(plain))
    x = torch.randn(2, 8, requires_grad=True)
    grads = []
    for module in (plain, wrapped):
        module.grad = None
        for _ in range(2):
            module(x)
        grads.append(module.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("make", [ReadThenAdd, Rebound])
def test_module_state_given_by_functional_call_are_read_as_they_were(make, wrap):
    """Those advance once, and the module's own stay, though backward comes after the call."""
    plain = make()
    wrapped = wrap(copy.deepcopy(plain))
    x = torch.randn(3, 8)
    found = []
    for module in (plain, wrapped):
        name = next(name for name, _ in module.named_buffers())
        given = {name: torch.full((8,), 3.0)}
        for _ in range(2):
            functional_call(module, given, (x,)).sum().backward()
        found.append([*given.values(), *module.buffers(), *(p.grad for p in module.parameters())])
    assert_same(*found)


class Average(nn.Module):
    """A tensor in a plain attribute that forward reads and replaces."""

    def __init__(self, size=8) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.mean = torch.zeros(size)

    def forward(self, x):
        y = self.l(x) + self.mean[:8]
        self.mean = self.mean * 0.5 + 1
        return torch.tanh(y) * y


def test_tensors_in_attributes_are_read_as_they_were(wrap):
    """Replaced by forward, and by other code before backward."""
    plain = Average()
    wrapped = wrap(copy.deepcopy(plain))
    found = []
    for module in (plain, wrapped):
        loss = sum(module(torch.ones(2, 8)).sum() for _ in range(2))
        holder = next(m for m in module.modules() if isinstance(m, Average))
        holder.mean = torch.zeros(8)
        loss.backward()
        assert torch.equal(holder.mean, torch.zeros(8))
        found.append([p.grad for p in module.parameters()])
    assert_same(*found)


def test_a_large_attribute_written_in_place_is_refused(wrap):
    """The error names it, and says to use a buffer."""

    class InPlace(Average):
        def forward(self, x):
            y = self.l(x) + self.mean[:8]
            self.mean.add_(1)
            return torch.tanh(y) * y

    loss = wrap(InPlace(LARGE))(torch.ones(2, 8)).sum()
    with pytest.raises(RecomputeError, match=r"attribute 'mean' of module .* Register the tensor"):
        loss.backward()


def test_a_compiled_module_inside_reads_buffers_as_they_were():
    """Compiled code is the same in both runs."""
    plain = nn.Sequential(ReadThenAdd())
    wrapped = copy.deepcopy(plain)
    wrapped[0].compile(backend="eager", fullgraph=True)
    checkpoint_(wrapped)
    assert_same(results(wrapped), results(plain))


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm1d, partial(nn.LazyLinear, 8)])
def test_a_lazy_layer_without_values_is_refused(wrap, lazy):
    """Its first forward makes them; with gradients off the module runs, and then it is right."""
    module = wrap(nn.Sequential(nn.Linear(8, 8), lazy(), nn.Tanh()))
    with pytest.raises(ModuleError, match=r"Run one forward under torch\.no_grad"):
        module(torch.ones(2, 8))
    with torch.no_grad():
        module(torch.ones(2, 8))
    module(torch.ones(2, 8)).sum().backward()
