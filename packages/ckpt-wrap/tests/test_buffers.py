"""Buffers that forward reads and writes: the second run reads them as the first one found them."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from ckpt_wrap import (
    CheckpointImpl,
    RecomputeError,
    checkpoint_,
    checkpoint_wrapper,
    is_recomputing,
)
from ckpt_wrap.checkpointing import _buffers

LARGE = 5000  # numel of what is not copied before each run


class Layer(nn.Module):
    """A linear layer with a buffer; what is done with the buffer is each test's own."""

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
    """An average as in DINO."""

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
    """A cache that is made by the first call."""

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
    """A buffer that is not copied unless it is known to be written."""

    def __init__(self) -> None:
        super().__init__(LARGE)

    def use(self, y):
        y = y + self.b[:8]
        self.b.add_(1)
        return y


class NotANumber(Layer):
    """A buffer with NaN that is read only, and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nan", torch.full((8,), torch.nan))

    def use(self, y):
        y = y + self.b + self.nan.nan_to_num()
        self.b.add_(1)
        return y


class Codebook(Layer):
    """Vector quantization with codes that are averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("started", torch.tensor(False))

    def use(self, y):
        if not self.started:
            self.codes.copy_(y.detach()[:4])
            self.started.fill_(True)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest]
        with torch.no_grad():
            for code in range(4):
                if (nearest == code).any():
                    self.codes[code].lerp_(y[nearest == code].mean(0), 0.3)
        return y * quantized + ((y - quantized) ** 2)


class Tied(Layer):
    """One buffer at two places: written at one, read at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.l.register_buffer("same", self.b)

    def use(self, y):
        self.b.add_(1)
        return y + self.l.same


class Guarded(Layer):
    """Takes care itself, and reads what it has written."""

    def use(self, y):
        if not is_recomputing():
            self.b.add_(1)
        return y + self.b


class GuardedAfter(Layer):
    """Takes care itself, after it has read."""

    def use(self, y):
        y = y + self.b
        if not is_recomputing():
            self.b.add_(1)
        return y


class GuardsAnother(Layer):
    """Guards what is no buffer, and then has a layer that writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Centre()
        self.steps = 0

    def use(self, y):
        if not is_recomputing():
            self.steps += 1
        return self.inner(y) + self.b


def spectral():
    """Vectors of a power iteration, advanced by each forward."""
    return nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh())


def batch_norm():
    """A cumulative average, which is read before it is written."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh())


MODULES = [
    AddThenRead,
    ReadThenAdd,
    Centre,
    Rebound,
    FromNone,
    ThroughData,
    Large,
    NotANumber,
    Codebook,
    Tied,
    Guarded,
    GuardedAfter,
    GuardsAnother,
    spectral,
    batch_norm,
]


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
    """All before one backward; REENTRANT adds their gradients up in another order."""
    plain = make()
    wrapped = wrap(copy.deepcopy(plain))
    found, expected = results(wrapped, calls=3), results(plain, calls=3)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("options", [{"debug": True}, {"early_stop": False}], ids=str)
@pytest.mark.parametrize("make", MODULES)
def test_buffers_are_the_same_with_other_options(make, options, monkeypatch):
    """With torch's own checkpoint around the call, and where the second run goes to its end."""
    # Torch logs records that only its own handler can format, and pytest adds one of its own.
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", False)
    plain = make()
    wrapped = checkpoint_(copy.deepcopy(plain), **options)
    assert_same(results(wrapped), results(plain))


@pytest.mark.parametrize("impls", list(itertools.product(CheckpointImpl, repeat=2)), ids=str)
@pytest.mark.parametrize("make", MODULES)
def test_nested_modules_read_buffers_as_they_were(make, impls):
    """A checkpointed module inside another: the inner one's first run happens twice."""
    plain = nn.Sequential(ReadThenAdd(), nn.Sequential(make(), Centre()), ReadThenAdd())
    wrapped = copy.deepcopy(plain)
    checkpoint_(wrapped[1][0], checkpoint_impl=impls[0])
    checkpoint_(wrapped, checkpoint_impl=impls[1])
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
    fails = False

    def forward(self, x):
        result = super().forward(x)
        if self.fails:
            raise ValueError("told to")
        return result


def test_a_second_run_that_fails_leaves_the_very_tensors(wrap):
    """An exception passes, and the next step is right."""
    wrapped = wrap(Fails())
    inner = next(m for m in wrapped.modules() if isinstance(m, Fails))
    with set_checkpoint_early_stop(False):
        loss = wrapped(torch.randn(2, 8, requires_grad=True)).sum()
        before = inner.b
        inner.fails = True
        with pytest.raises(ValueError, match="told to"):
            loss.backward()
    assert inner.b is before
    assert torch.equal(before, torch.ones(8))


class WritesLater(Large):
    """Writes its large buffer from the second call on."""

    calls = 0

    def use(self, y):
        self.calls += not is_recomputing()
        return super().use(y) if self.calls > 1 else y + self.b[:8]


def test_a_first_write_that_comes_later_is_refused_once(wrap):
    """There is no copy to read; from then on there is one."""
    wrapped = wrap(nn.Sequential(WritesLater()))
    buffer = next(wrapped.buffers())
    x = torch.randn(2, 8, requires_grad=True)
    wrapped(x).sum().backward()
    loss = wrapped(x).sum()
    with pytest.raises(
        RecomputeError,
        match=r"buffer '0\.b' of module .*Sequential.* was changed in place by its own forward "
        r"for the first time, but recomputation needs it as it was before\. Run the step again: "
        r"from now on it is copied before each forward\.",
    ):
        loss.backward()
    assert next(wrapped.buffers()) is buffer
    assert torch.equal(buffer, torch.ones(LARGE))
    wrapped(x).sum().backward()
    assert torch.equal(buffer, torch.full((LARGE,), 2.0))


def test_the_first_call_in_training_may_come_after_one_in_evaluation(wrap):
    """What a module writes in training only is found there."""

    class InTraining(Large):
        def use(self, y):
            return super().use(y) if self.training else y + self.b[:8]

    plain = InTraining()
    wrapped = wrap(copy.deepcopy(plain))
    for module in (plain, wrapped):
        results(module.eval(), steps=1)
    assert_same(results(wrapped.train()), results(plain.train()))


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


def test_only_what_forward_writes_is_kept(wrap, monkeypatch):
    """No copy stays of what is only read, or of a call that nothing is saved of."""
    seen = []
    end = _buffers.Buffers.end

    def note(self, *, keep):
        end(self, keep=keep)
        seen.append([item.name for item in self._kept])

    monkeypatch.setattr(_buffers.Buffers, "end", note)
    written = wrap(ReadThenAdd())
    written.register_buffer("only_read", torch.ones(3))
    x = torch.randn(2, 8, requires_grad=True)
    loss = written(x).sum()
    assert seen == [["b"]]
    loss.backward()
    seen.clear()
    checkpoint_wrapper(ReadThenAdd().requires_grad_(False))(x.detach())
    assert seen == [[]]


def test_buffers_on_meta_are_followed_by_version(wrap):
    """They have no content to compare."""
    wrapped = wrap(ReadThenAdd().to("meta"))
    for _ in range(2):
        wrapped(torch.randn(2, 8, device="meta", requires_grad=True)).sum().backward()
    assert wrapped.b.is_meta


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
