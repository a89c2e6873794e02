"""Which steps of a report are looked at operator by operator."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mod_tracker import profile_flops, profile_memory, watch_memory
from mod_tracker._torch_compat import top_mode, top_saved_hooks


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def step(model, rows=2):
    """One forward and backward; the gradients of the step before are dropped first."""
    model.zero_grad()
    model(torch.randn(rows, 4)).sum().backward()


def test_flops_of_every_step_are_counted(mlp):
    """Operators without a formula are listed in fewer and fewer steps, products in all of them."""
    with profile_flops() as report:
        for _ in range(20):
            step(mlp)
    assert report.total == 20 * (2 * 64 + 64 + 2 * 64)  # the input needs no gradient
    assert report.uncounted["aten.relu.default"] == 6  # 1, 2, 3, 4, 8, 16
    assert report.notes[0].startswith("operators without a formula were listed in 6 of 20 steps")
    assert report.table().endswith(report.notes[0])


def test_flops_are_counted_the_same_in_every_step(mlp):
    """Whether or not a step is looked at, also for what a fused kernel does inside."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).eval()
    with profile_flops() as one, torch.inference_mode():
        layer(torch.randn(2, 6, 16))
    with profile_flops() as many, torch.inference_mode():
        for _ in range(7):
            layer(torch.randn(2, 6, 16))
    assert one.total > 0
    assert many.total == 7 * one.total


def test_every_step_can_be_looked_at(mlp):
    """Then nothing is left to say."""
    with profile_flops(every_step=True) as flops, profile_memory(every_step=True) as memory:
        for _ in range(9):
            step(mlp)
    assert flops.uncounted["aten.relu.default"] == 9
    assert flops.notes == memory.notes == ()


def test_memory_of_some_steps_is_that_of_each(mlp):
    """Amounts are those of the steps that are looked at; the peak is that of any."""
    with profile_memory(mlp, every_step=True) as one:
        step(mlp)
        step(mlp)
    with profile_memory(mlp) as many:
        for _ in range(20):
            step(mlp)
    assert many.totals["saved"] == 3 * one.totals["saved"]
    assert many.peak == one.peak
    assert many.notes[0].startswith("allocations were looked at in 6 of 20 steps")


def test_a_step_of_another_shape_is_looked_at(mlp):
    """However many there were before it."""
    with profile_memory(mlp) as report:
        for _ in range(6):
            step(mlp)
        step(mlp, rows=1000)
        step(mlp)
    assert report.peak > 1000 * 4 * 4
    assert report.notes[0].startswith("allocations were looked at in 5 of 8 steps")


def test_a_step_without_gradients_is_a_call(mlp):
    """Nobody goes back, so a step ends when the next one begins."""
    with profile_flops() as report, torch.no_grad():
        for _ in range(8):
            mlp(torch.randn(2, 4))
    assert report.uncounted["aten.relu.default"] == 5
    assert report.total == 8 * 128


def test_several_calls_before_a_backward_are_one_step(mlp):
    """As of two towers."""
    with profile_flops() as report:
        for _ in range(5):
            (mlp(torch.randn(2, 4)) + mlp(torch.randn(2, 4))).sum().backward()
    assert report.uncounted["aten.relu.default"] == 2 * 4


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory])
def test_contexts_of_the_users_are_left_in_order(report_of, mlp):
    """A mode that is open around the call, or was opened before it, is closed as ever."""
    with report_of() as report:
        for number in range(12):
            with Passing():
                if number % 2:
                    torch.ones(1)
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    step(mlp)
            assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert report.notes == ()  # it could not stop looking, and so it went on


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory])
@pytest.mark.parametrize("outer", [False, True])
def test_inference_mode_is_left_as_it_was(report_of, outer, mlp):
    """It puts back what it found, and so nothing is switched inside of it."""
    x = torch.randn(2, 4)
    with torch.inference_mode(outer), report_of():
        for _ in range(7):
            with torch.inference_mode():
                mlp(x)
            torch.ones(1)
    assert torch.ones(2).sum() == 2


def test_autocast_is_not_in_the_way(mlp):
    """As mixed precision has it around every forward."""
    with profile_memory(mlp) as report:
        for _ in range(7):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mlp(torch.randn(2, 4)).sum()
            loss.backward()
    assert report.notes[0].startswith("allocations were looked at in 4 of 7 steps")


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory])
def test_contexts_are_closed_after_an_error(report_of, mlp):
    """In a step that is looked at, and in one that is not."""
    for steps in (1, 6):
        with pytest.raises(ZeroDivisionError), report_of():
            for _ in range(steps):
                step(mlp)
            raise ZeroDivisionError
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("first", [profile_flops, profile_memory, watch_memory])
@pytest.mark.parametrize("second", [profile_flops, profile_memory])
@pytest.mark.parametrize("steps", [1, 6], ids=["looked_at", "not_looked_at"])
def test_reports_may_end_in_the_order_they_began(first, second, steps, mlp):
    """The second sees what runs after the first as if that had never been, and nothing is left."""

    def measured(first):
        step(mlp)
        before, context = first(), second(every_step=second is profile_flops)
        before.__enter__()
        report = context.__enter__()
        for _ in range(steps):
            step(mlp)
        before.__exit__(None, None, None)
        for _ in range(steps):
            step(mlp)
        step(mlp, rows=1000)
        context.__exit__(None, None, None)
        assert top_mode() is None
        assert top_saved_hooks() is None
        return report

    alone, after = measured(nullcontext), measured(first)
    assert after.total == alone.total > 0
    if second is profile_memory:
        assert (after.peak, after.totals) == (alone.peak, alone.totals)
