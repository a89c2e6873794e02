"""Buffers that a later region writes before backward, and refused writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

from sac_policies import MutationError, checkpoint, recompute_all, save_ops

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

POLICIES = [recompute_all(), save_ops("aten.mm", "aten.cos")]
# Without comparing bits, the result depends only on the tensors a region holds.
OPTIONS = [{"policy": each, "determinism_check": "none"} for each in POLICIES]
every_policy = pytest.mark.parametrize("options", OPTIONS, ids=["nothing", "mm"])

Run = Callable[..., Tensor]


def outcome(step: Callable[..., Tensor], run: Run) -> list[Tensor]:
    """Gradients of a step of two regions, each with an input and a weight."""
    inputs = [
        torch.linspace(-1, 1, 64).roll(each).view(8, 8).requires_grad_() for each in (0, 5, 9)
    ]
    return list(torch.autograd.grad(step(run, *inputs), inputs))


def region(options: dict[str, Any]) -> Run:
    """Run a function as a region."""
    return lambda function, *args: checkpoint(function, *args, **options)


def plainly(function: Run, *args: Any) -> Tensor:
    """Run a function without a region."""
    return function(*args)


def own_average(run: Run, x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Two micro-batches of a region that updates its average, then reads it."""
    average = torch.zeros(8)

    def block(t: Tensor) -> Tensor:
        average.mul_(0.9).add_(t.detach().mean(0), alpha=0.1)
        return (t @ w - average).sin().cos()

    return run(block, x).sum() + run(block, z).sum()


def pair(update: Callable[[Tensor], object]) -> Callable[..., Tensor]:
    """A region that reads a buffer, then one that writes to it."""

    def step(run: Run, x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        buffer = torch.ones(8)

        def reads(t: Tensor) -> Tensor:
            return (t - buffer[:4].repeat(2)).sin() @ w

        def writes(t: Tensor) -> Tensor:
            update(buffer)
            return (t + buffer).cos()

        return run(reads, x).sum() + run(writes, z).sum()

    return step


def batch_norm(run: Run, x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Batch norm writes its statistics without changing a version counter under a mode."""
    norm = nn.BatchNorm1d(8)

    def reads(t: Tensor) -> Tensor:
        assert norm.running_mean is not None
        return (t - norm.running_mean).sin() @ w

    return run(reads, x).sum() + run(norm, z).sum() + run(norm, x).sum()


def largest_norm(run: Run, x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """An embedding with `max_norm` writes to the rows that it looks up."""
    table = nn.Embedding(8, 8, max_norm=0.5)
    nn.init.constant_(table.weight, 2.0)

    def block(t: Tensor, rows: Tensor) -> Tensor:
        return (table(rows) + t).sin() @ w

    return run(block, x, torch.arange(8)).sum() + run(block, z, torch.arange(7, -1, -1)).sum()


STEPS = {
    "average": own_average,
    "write": pair(lambda buffer: buffer.mul_(0.5)),
    "view": pair(lambda buffer: buffer[2:].fill_(3)),
    "foreach": pair(lambda buffer: torch._foreach_mul_([buffer], 0.5)),
    "out": pair(lambda buffer: torch.sin(torch.ones(8), out=buffer)),
    "batch norm": batch_norm,
    "max_norm": largest_norm,
}


@every_policy
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_buffer_written_by_later_region_is_bit_identical(step, options):
    """Plain autograd does not save the buffer; a region reads it again, so it holds a copy."""
    expected = outcome(step, plainly)
    for a, b in zip(outcome(step, region(options)), expected, strict=True):
        assert torch.equal(a, b)


def written_outside(numel: int, run: Run) -> Tensor:
    """Gradient of a region whose buffer is written to between forward and backward."""
    buffer, x = torch.linspace(0, 1, numel), torch.ones(numel, requires_grad=True)
    out = run(lambda t: (t - buffer).sin(), x)
    buffer.mul_(2)
    return torch.autograd.grad(out.sum(), x)[0]


@every_policy
def test_small_buffer_written_outside_of_regions_is_bit_identical(options):
    """Plain autograd does not save the buffer, so the region copies it."""
    found, expected = (written_outside(4096, run) for run in (region(options), plainly))
    assert torch.equal(found, expected)


@every_policy
def test_large_buffer_written_outside_of_regions_is_refused(options):
    """No dispatch mode sees the write; the version counter does."""
    with pytest.raises(MutationError, match=r"\[4097\].*changed in place after the region"):
        written_outside(4097, region(options))


@pytest.mark.parametrize("write", [Tensor.mul_, lambda t, by: torch._foreach_mul_([t], by)])
@every_policy
def test_saved_tensor_written_by_later_region_is_refused(options, write):
    """As by plain autograd."""

    def step(run: Run, x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        buffer = torch.ones(8)

        def writes(t: Tensor) -> Tensor:
            write(buffer, 0.5)
            return t.cos()

        return run(lambda t: (t * buffer) @ w, x).sum() + run(writes, z).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(step, plainly)
    with pytest.raises(MutationError):
        outcome(step, region(options))


@pytest.mark.parametrize("foreach", [False, True])
@every_policy
def test_optimizer_step_before_backward_is_refused(options, foreach):
    """Also for a bias, which plain autograd does not save."""
    linear, x = nn.Linear(8, 8), torch.randn(8, 8)
    for only in (linear.weight, linear.bias):
        out = checkpoint(lambda t: (t @ linear.weight.sin() + linear.bias).sin(), x, **options)
        only.grad = torch.ones_like(only)
        torch.optim.SGD([only], lr=0.1, foreach=foreach).step()
        with pytest.raises(MutationError):
            out.sum().backward()


@pytest.mark.parametrize("pack", [lambda t: t, lambda t: (t, 0)], ids=["itself", "tuple"])
@every_policy
def test_write_under_hooks_that_pass_tensors_through_is_refused(options, pack):
    """Autograd does not compare versions of tensors packed by saved-tensor hooks."""

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0]

    with saved_tensors_hooks(pack, unpack), pytest.raises(MutationError):
        outcome(STEPS["write"], region(options))


@every_policy
@pytest.mark.parametrize("write", ["whole", "view"])
def test_wrapper_subclass_changed_after_the_region_is_refused(options, write):
    """The versions of its inner tensors do not show the write."""
    w = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))
    out = checkpoint(lambda t: (t @ w.t() * 2).sin().cos().sum(), x, **options)
    with torch.no_grad():
        (w if write == "whole" else w[:2]).mul_(0.5)
    if options["policy"] == POLICIES[0]:
        with pytest.raises(MutationError, match="shape \\[8, 8\\]"):
            out.backward()
    else:
        out.backward()


def test_wrapper_subclass_changed_inside_the_region():
    """Backward reads the old bits, of which the region made a copy."""
    w = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))

    def run(x: Tensor, state: Tensor) -> Tensor:
        y = (x @ w.t() + state).sin()
        state.mul_(2.0)
        return (y.exp() + state).sum()

    found = []
    for call in (plainly, region(OPTIONS[0])):
        state = TwoTensor(torch.full((8, 8), 0.1), torch.full((8, 8), 0.2))
        x = TwoTensor(torch.ones(8, 8), torch.ones(8, 8))
        (grad,) = torch.autograd.grad(call(run, x, state), w)
        found.append((grad.a, grad.b))
    assert all(map(torch.equal, *found))
