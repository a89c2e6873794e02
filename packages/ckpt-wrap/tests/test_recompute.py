"""The second run: when there is one, what it does, and what is kept for it."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from ckpt_wrap import RecomputeError, checkpoint_, is_recomputing


def test_random_state_outside_is_not_touched(block_class):
    """Recomputing leaves the random state as backward found it."""
    module = checkpoint_(block_class())
    loss = module(torch.randn(2, 8, requires_grad=True)).sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())


def test_preserve_rng_state_false_does_not_replay(block_class):
    """Without preserving, dropout differs in recomputation: the option has an effect."""
    torch.manual_seed(0)
    masks = []
    module = checkpoint_(block_class(64), preserve_rng_state=False)
    module.dropout.register_forward_hook(lambda _, __, out: masks.append(out == 0))
    module(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert not torch.equal(*masks)


def test_autocast_and_default_device_are_replayed():
    """A recomputation after leaving autocast and `torch.device` runs as if inside."""

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.seen = []

        def forward(self, x):
            y = self.linear(x)
            self.seen.append((y.dtype, torch.get_default_device().type))
            return torch.tanh(y) * 2

    module = checkpoint_(Notes())
    x = torch.randn(1, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        loss = module(x).sum()
    loss.backward()
    assert module.seen == [(torch.bfloat16, "meta")] * 2


def test_early_stop_ends_at_the_last_saved_tensor(block_class):
    """What comes after the last saved tensor is not run again, unless asked to be."""
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


def test_nested_regions_recompute_outer_then_inner(block_class, gradients, equal):
    """A checkpointed module inside a checkpointed module has the plain gradients."""
    plain = nn.Sequential(block_class(), nn.Sequential(block_class(), block_class()))
    wrapped = copy.deepcopy(plain)
    checkpoint_(checkpoint_(wrapped)[1])
    checkpoint_(wrapped[1][0])
    x = torch.randn(2, 8, requires_grad=True)
    assert equal(gradients(plain, lambda m: m(x), x), gradients(wrapped, lambda m: m(x), x))


def test_second_backward_and_double_backward(equal):
    """`retain_graph`, `autograd.grad` and gradients of gradients agree with the plain module."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid())
    wrapped = checkpoint_(copy.deepcopy(plain))
    x = torch.randn(2, 4, requires_grad=True)

    def values(module):
        loss = module(x).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(again[0].pow(2).sum(), [x, *module.parameters()][:3])
        return [*first, *again, *second]

    assert equal(values(plain), values(wrapped))


def test_backward_inside_the_region(equal):
    """A module that differentiates inside its own forward can be checkpointed."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y * slope

    plain = Inner()
    wrapped = checkpoint_(copy.deepcopy(plain))

    def values(module):
        x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
        module(x).sum().backward()
        return [x.grad, module.linear.weight.grad]

    assert equal(values(plain), values(wrapped))


def test_nothing_stays_alive_after_backward(block_class):
    """No reference cycle keeps an input or a recomputed tensor."""
    gc.collect()
    gc.disable()
    try:
        module = checkpoint_(block_class())
        x = torch.randn(2, 8, requires_grad=True) * 1
        ref = weakref.ref(x)
        module(x).sum().backward()
        del x
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputed_tensors_are_given_up_when_read(early_stop):
    """Even where the graph is retained, and without help from the garbage collector."""
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
        loss = module(torch.randn(2, 3, requires_grad=True)).sum()
        loss.backward(retain_graph=True)
        assert len(made) >= 6
        assert all(storage.expired() for storage in made)
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
    """Fails once in recomputation, and tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.tries = 0

    def attempt(self, x):
        hidden = (x @ self.weight).sin().exp()
        self.tries += 1
        if self.tries == 2:
            raise MemoryError
        return hidden * (hidden @ self.weight).tanh()

    def forward(self, x):
        try:
            return self.attempt(x)
        except MemoryError:
            return self.attempt(x)


def test_other_operators_in_recomputation_are_an_error():
    """Saved tensors of equal shapes are told apart by the nodes that made them."""
    module = checkpoint_(Retries())
    loss = module(torch.randn(4, 4, requires_grad=True)).sum()
    with pytest.raises(RecomputeError, match="made by ExpBackward0 in forward"):
        loss.backward()
    assert module.weight.grad is None


@pytest.mark.parametrize("functional", [True, False])
def test_noise_that_is_written_after_it_is_saved(functional, wrap):
    """`rrelu` saves its noise before its kernel fills it."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(64, 64), nn.RReLU()

        def forward(self, x):
            x = self.linear(x)
            return nn.functional.rrelu(x, training=True) if functional else self.act(x)

    plain, found = nn.Sequential(Noisy(), Noisy()), []
    wrapped = nn.Sequential(*[wrap(copy.deepcopy(block)) for block in plain])
    for module in (plain, wrapped):
        torch.manual_seed(0)
        module(torch.ones(2048, 64)).square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *found))


class Nothing(TorchDispatchMode):
    """A dispatch mode that changes no operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Reshapes(nn.Module):
    """A matmul of four axes, which reshapes by another operator under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.linear(x.sin()).unflatten(-1, (2, 4))
        return torch.matmul(y, y.mT).sigmoid()


@pytest.mark.parametrize("in_forward", [True, False])
def test_dispatch_mode_around_one_of_the_runs_is_no_error(in_forward):
    """Profilers and counters are such modes; the values are the same."""
    plain = Reshapes()
    module = checkpoint_(copy.deepcopy(plain))
    x = torch.randn(2, 2, 8)
    plain(x).sum().backward()
    with Nothing() if in_forward else contextlib.nullcontext():
        loss = module(x).sum()
    with contextlib.nullcontext() if in_forward else Nothing():
        loss.backward()
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


def test_nothing_is_kept_where_nothing_requires_grad(wrap):
    """Not even the inputs, which hooks around the call would see."""
    module = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).requires_grad_(False)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda t: t):
        result = module(x := torch.ones(1, 2))
    assert not result.requires_grad
    assert not packed
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_is_recomputing_only_while_recomputing(wrap):
    """False in forward, True in the second run, False again after."""

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.seen = []

        def forward(self, x):
            self.seen.append(is_recomputing())
            return torch.tanh(self.linear(x))

    module = wrap(Watch())
    module(torch.randn(1, 2, requires_grad=True)).sum().backward()
    assert module.seen == [False, True]
    assert not is_recomputing()
