"""Floating-point operations: what is counted, where, and what is listed instead."""

from __future__ import annotations

import torch
from torch import nn

from mod_tracker import profile_flops


def test_flops_in_inference_mode_are_those_of_the_parts(x):
    """Composite operators, which arrive whole there, are decomposed and counted."""
    with torch.inference_mode(), profile_flops() as report:
        nn.Linear(4, 4)(x.detach())
    assert report["Linear"].forward == 64


def test_what_follows_a_backward_that_makes_a_graph_is_outside(x):
    """The last module of that backward gets nothing of what comes after it."""
    model, weight = nn.Linear(4, 4, bias=False), torch.ones(4, 4, requires_grad=True)
    with profile_flops() as report:
        (grad,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
        (grad @ weight).sum().backward()
    product = 2 * len(x) * 4 * 4
    assert (report.outside.forward, report.outside.backward) == (product, 2 * product)


class RunsABackward(nn.Module):
    """Its last node, that of a change in place, is made just before another one's backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x, other, grad):
        y = x * 1
        y[:].addmm_(x, self.weight)
        other.backward(grad)
        return y


def test_a_node_made_before_another_modules_backward_is_its_makers(x):
    """A backward inside a forward takes none of the nodes around it."""
    layer, module = nn.Linear(4, 4, bias=False), RunsABackward()
    with profile_flops() as report:
        module(x, layer(x), torch.ones(len(x), 4)).sum().backward()
    product = 2 * len(x) * 4 * 4
    assert report["RunsABackward"].self_backward == 2 * product
    assert report["Linear"].self_backward == 2 * product


def test_flops_list_operators(x):
    """By operator, with and without a formula."""
    with profile_flops() as report:
        nn.Sequential(nn.Linear(4, 4), nn.ReLU())(x)
    assert report.by_operator == {"aten.addmm.default": 64}
    assert report.uncounted["aten.relu.default"] == 1
    assert report.to_dict()["uncounted"] == report.uncounted
