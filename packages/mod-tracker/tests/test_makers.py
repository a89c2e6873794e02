"""Nodes that a backward makes in a thread that made none of those it runs."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mod_tracker import profile_flops

PRODUCT = 2 * 4 * 4 * 4


def in_thread(function):
    """Run it in a thread that has made no nodes, as torch runs the backward of a device.

    There, modes are on that are on where the backward was asked for.
    """
    found, modes = [], _get_current_dispatch_mode_stack()

    def run():
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            found.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def gradient_penalty(model, x, run=lambda function: function()):
    """The gradient of the square of a gradient; `run` runs the first backward."""
    loss = model(x).sum()
    grad = run(lambda: torch.autograd.grad(loss, x, create_graph=True)[0])
    grad.pow(2).sum().backward()


def slope(out, leaf):
    """A gradient that can be gone back through."""
    return torch.autograd.grad(out, leaf, create_graph=True)[0]


def layers(device="cpu"):
    """Two layers whose double backward is known."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)


def expect_penalty(report, times=1):
    """Nothing is left outside, five products are layer 0's and two layer 2's."""
    assert report.outside.total == 0
    assert report["Sequential.0"].backward == times * 5 * PRODUCT
    assert report["Sequential.2"].backward == times * 2 * PRODUCT


def test_third_order():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    found = []
    for run in (lambda function: function(), in_thread):
        leaf = x.clone().requires_grad_()
        with profile_flops() as report:
            out = model(leaf).sum()
            for _ in range(2):
                out = run(partial(slope, out, leaf))
                out = out.pow(2).sum()
            out.backward()
        found.append(report)
    assert found[0].outside.total == found[1].outside.total == 0
    assert found[0].rows == found[1].rows


def test_nodes_of_leaves_are_not_marked():
    """They outlive the graph, and would keep what is written on them."""
    model, x = layers(), torch.randn(4, 4, requires_grad=True)
    kept = x.view_as(x).grad_fn.next_functions[0][0]
    with profile_flops():
        gradient_penalty(model, x, in_thread)
    assert not any("maker" in key for key in kept.metadata)
    assert not x._backward_hooks


@pytest.mark.accelerator
def test_on_a_device_with_a_backward_thread_of_its_own(accelerator):
    """The same on an accelerator, where torch starts that thread."""
    model = layers(accelerator)
    with profile_flops() as report:
        for _ in range(7):
            gradient_penalty(model, torch.randn(4, 4).to(accelerator).requires_grad_())
    expect_penalty(report, 7)
