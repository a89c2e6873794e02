"""Time: where it is spent, which clock reads it, and which threads are followed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from mod_tracker import OptionError, profile_time


@pytest.mark.parametrize(
    ("there", "says"),
    [(False, "there is no accelerator. Use clock='cpu'."), (True, "'meta'. Use clock='device'.")],
)
def test_clock_of_a_device_that_is_not_there_is_refused(monkeypatch, there, says):
    """As text, before anything is measured."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    with pytest.raises(OptionError) as error, profile_time(clock="cuda"):
        pass
    assert str(error.value).startswith(
        "mod_tracker.profile_time: clock 'cuda' cannot be read, but it must be 'cpu', 'device', or "
        "the type of this machine's accelerators, and there is "
    )
    assert str(error.value).endswith(says)


def test_modules_in_other_threads_are_not_timed(mlp, x):
    """Their time passes beside that of the thread that measures."""
    with profile_time() as report:
        thread = threading.Thread(target=lambda: nn.Sequential(nn.ReLU())(torch.ones(1)))
        thread.start()
        thread.join()
        mlp(x)
    assert set(report.rows) == {"MLP", "MLP.a", "MLP.b"}


def test_backward_in_a_thread_of_torchs_own_is_timed(mlp, x):
    """A thread that runs no module of its own is followed, wherever it runs a backward."""
    with profile_time() as report:
        loss = mlp(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert report["MLP.a"].backward > 0


@pytest.mark.parametrize("again", [False, True])
def test_time_after_a_backward_that_failed_is_outside(clock, again):
    """Also where it runs once more, with no forward in between."""
    model, fails = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [True]

    def hook(grad):
        if fails[0]:
            raise ValueError("stopped")

    with profile_time() as report:
        hidden = model[0](torch.ones(2, 4, requires_grad=True))
        hidden.register_hook(hook)
        out = model[1](hidden).sum()
        with pytest.raises(ValueError, match="stopped"):
            out.backward(retain_graph=True)
        if again:
            fails[0] = False
            out.backward()
        clock.passes(50)
    assert {row.backward for row in report if row.name} == {0}
    assert report.outside.self_total == 50


def test_time_is_spent_where_it_passes(clock):
    """A slow module has the time, in forward and in backward."""

    class Slow(nn.Module):
        def forward(self, x):
            clock.passes(20)
            y = x * 2
            y.register_hook(lambda grad: clock.passes(30))
            return y * 1

    model = nn.Sequential(nn.Identity(), Slow(), nn.Identity())
    with profile_time() as report:
        model(torch.ones(1, requires_grad=True)).sum().backward()
    slow = report["Sequential.1"]
    assert (slow.forward, slow.backward, slow.total) == (20, 30, 50)
    assert report["Sequential.0"].total == 0
