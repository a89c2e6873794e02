"""Recomputation: when it happens, which operators run, and which tensors are kept for it."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from ckpt_wrap import RecomputeError, checkpoint_, checkpoint_wrapper, is_recomputing

aten = torch.ops.aten


def test_preserve_rng_state_false_does_not_replay(block_class):
    """With `preserve_rng_state=False`, recomputation draws another dropout mask."""
    torch.manual_seed(0)
    masks = []
    module = checkpoint_(block_class(64), preserve_rng_state=False)
    module.dropout.register_forward_hook(lambda _, __, out: masks.append(out == 0))
    module(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert not torch.equal(*masks)


def test_autocast_and_default_device_are_replayed():
    """Recomputation restores autocast and `torch.device`, also after both were exited."""

    seen = []

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            y = self.linear(x)
            seen.append((y.dtype, torch.get_default_device().type))
            return torch.tanh(y) * 2

    module = checkpoint_(Notes())
    x = torch.randn(1, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        loss = module(x).sum()
    loss.backward()
    assert seen == [(torch.bfloat16, "meta")] * 2


def test_early_stop_ends_at_the_last_saved_tensor(block_class):
    """Operators after the last saved tensor are not recomputed unless early stop is disabled."""
    ran = []

    class Tail(nn.Module):
        def forward(self, x):
            ran.append("tail")
            return x + 1

    for options, expected in (
        ({}, ["tail"]),
        ({"early_stop": True}, ["tail"]),
        ({"early_stop": False}, ["tail"] * 2),
    ):
        ran.clear()
        module = checkpoint_(nn.Sequential(block_class(), Tail()), **options)
        module(torch.randn(1, 8, requires_grad=True)).sum().backward()
        assert ran == expected
    ran.clear()
    module = checkpoint_(nn.Sequential(block_class(), Tail()))
    with set_checkpoint_early_stop(False):
        loss = module(torch.randn(1, 8, requires_grad=True)).sum()
    loss.backward()
    assert ran == ["tail"] * 2


@pytest.mark.parametrize("early_stop", [True, False])
def test_nothing_stays_alive_after_backward(early_stop):
    """Recomputed tensors are freed when read, inputs with the graph; no cycle keeps them."""
    gc.collect()
    gc.disable()
    try:
        module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
        made = []
        for layer in module:
            layer.register_forward_hook(
                lambda m, args, result: made.append(StorageWeakRef(result.untyped_storage()))
            )
        checkpoint_(module, early_stop=early_stop)
        x = torch.randn(2, 3, requires_grad=True) * 1
        given = weakref.ref(x)
        loss = module(x).sum()
        loss.backward(retain_graph=True)
        assert len(made) >= 6
        assert all(storage.expired() for storage in made)
        del loss, x
        assert given() is None
    finally:
        gc.enable()


def test_what_a_region_saves_is_its_inputs(block_class):
    """Outer saved-tensor hooks see each input once, keyword inputs too, and nothing else."""
    module = checkpoint_(block_class())
    x, scale = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x, scale=scale)
    assert [t.data_ptr() for t in packed] == [x.data_ptr(), scale.data_ptr()]


class Retries(nn.Module):
    """Fails once in recomputation, then tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.tries = itertools.count(1)  # an iterator: recomputation continues it

    def attempt(self, x):
        hidden = (x @ self.weight).sin().exp()
        if next(self.tries) == 2:
            raise MemoryError
        return hidden * (hidden @ self.weight).tanh()

    def forward(self, x):
        try:
            return self.attempt(x)
        except MemoryError:
            return self.attempt(x)


def test_other_operators_in_recomputation_are_an_error():
    """The error is raised even if all saved tensors have equal shapes: nodes are compared."""
    module = checkpoint_(Retries())
    loss = module(torch.randn(4, 4, requires_grad=True)).sum()
    with pytest.raises(RecomputeError, match="made by ExpBackward0 in forward"):
        loss.backward()
    assert module.weight.grad is None


@pytest.mark.parametrize("functional", [True, False])
def test_noise_that_is_written_after_it_is_saved(functional, layer, gradients, equal):
    """`rrelu` saves its noise before its kernel fills it."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(64, 64), nn.RReLU()

        def forward(self, x):
            x = self.linear(x)
            return nn.functional.rrelu(x, training=True) if functional else self.act(x)

    plain = nn.Sequential(Noisy(), Noisy())
    changed = nn.Sequential(*[layer(copy.deepcopy(block)) for block in plain])
    x = torch.ones(2048, 64)
    assert equal(gradients(plain, lambda m: m(x)), gradients(changed, lambda m: m(x)))


def test_a_module_that_swallows_exceptions_still_stops_early():
    """`except Exception` in the module cannot prevent the early stop."""

    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            try:
                y = torch.tanh(x * self.weight)
            except Exception:
                y = torch.sin(x * self.weight)
            return y

    module = Swallows()
    x = torch.ones(2, 3, requires_grad=True)
    module(x).sum().backward()
    expected = module.weight.grad.clone()
    module.zero_grad()
    checkpoint_(module)(x).sum().backward()
    assert torch.equal(expected, module.weight.grad)


class Careless(nn.Module):
    """Catches every exception of its body, then continues or raises another one."""

    def __init__(self, then=None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.then = then

    def forward(self, x):
        try:
            y = self.linear(x)
            return torch.tanh(y[:, :2] if is_recomputing() else y)
        except Exception:
            if self.then is not None:
                raise self.then from None
            return x


@pytest.mark.parametrize("then", [None, KeyError("other")])
def test_a_module_that_swallows_exceptions_cannot_hide_a_difference(then):
    """The error is raised, although the module caught it."""
    loss = checkpoint_(Careless(then))(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(RecomputeError, match="saved tensor 2 of module Careless is"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_inside_a_wrapper():
    """TorchScript saves other tensors after optimizing: first an error, then correct gradients."""
    wrapped = checkpoint_wrapper(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    loss = wrapped(torch.randn(3, 4, requires_grad=True)).sum()
    with contextlib.suppress(RecomputeError):
        loss.backward()
    wrapped(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert wrapped.get_parameter("0.weight").grad is not None


class Nothing(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Reshapes(nn.Module):
    """A 4-D matmul, which reshapes by another operator under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.linear(x.sin()).unflatten(-1, (2, 4))
        return torch.matmul(y, y.mT).sigmoid()


@pytest.mark.parametrize("in_forward", [True, False])
def test_dispatch_mode_around_one_of_the_runs_is_no_error(in_forward):
    """Profilers and operator counters are such modes; they do not change values."""
    plain = Reshapes()
    module = checkpoint_(copy.deepcopy(plain))
    x = torch.randn(2, 2, 8)
    plain(x).sum().backward()
    with Nothing() if in_forward else contextlib.nullcontext():
        loss = module(x).sum()
    with contextlib.nullcontext() if in_forward else Nothing():
        loss.backward()
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


@pytest.mark.parametrize("saved", [[], [aten.addmm], [aten.tanh], [aten.addmm, aten.tanh]], ids=str)
def test_nested_regions_with_contexts(saved, gradients, equal):
    """One inside another, each with a selective `context_fn`; two steps."""
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), inner, nn.Tanh(), nn.Dropout())
    changed = copy.deepcopy(plain)
    operators = [operator.default for operator in saved]
    options = {"context_fn": partial(create_selective_checkpoint_contexts, operators)}
    checkpoint_(checkpoint_(changed, **options)[2], **options)
    x = torch.randn(3, 6, requires_grad=True)
    for _ in range(2):
        expected = gradients(plain, lambda m: m(x).exp(), x)
        assert equal(expected, gradients(changed, lambda m: m(x).exp(), x))


def test_is_recomputing_only_while_recomputing(wrap):
    """False in forward, True in recomputation, False after it."""

    seen = []

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            seen.append(is_recomputing())
            return torch.tanh(self.linear(x))

    module = wrap(Watch())
    module(torch.randn(1, 2, requires_grad=True)).sum().backward()
    assert seen == [False, True]
    assert not is_recomputing()
