"""FLOPs: which operators count, for which module, and which are listed as uncounted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mod_tracker import profile_flops
from mod_tracker._torch_compat import mode_depth


def test_flops_in_inference_mode_are_those_of_the_parts(x):
    """Inference mode passes composite operators whole; they are decomposed and counted."""
    with torch.inference_mode(), profile_flops() as report:
        nn.Linear(4, 4)(x.detach())
    assert report["Linear"].forward == 64


def test_code_after_a_backward_with_create_graph_is_outside(x):
    """Operators after the backward do not count for its last module."""
    model, weight = nn.Linear(4, 4, bias=False), torch.ones(4, 4, requires_grad=True)
    with profile_flops() as report:
        (grad,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
        (grad @ weight).sum().backward()
    product = 2 * len(x) * 4 * 4
    assert (report.outside.forward, report.outside.backward) == (product, 2 * product)


class RunsABackward(nn.Module):
    """Runs a backward in its forward, right after an in-place change creates a node."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x, other, grad):
        y = x * 1
        y[:].addmm_(x, self.weight)
        other.backward(grad)
        return y


def test_node_before_a_backward_inside_a_forward_is_attributed(x):
    """A backward inside a forward does not change the attribution of nodes around it."""
    layer, module = nn.Linear(4, 4, bias=False), RunsABackward()
    with profile_flops() as report:
        module(x, layer(x), torch.ones(len(x), 4)).sum().backward()
    product = 2 * len(x) * 4 * 4
    assert report["RunsABackward"].self_backward == 2 * product
    assert report["Linear"].self_backward == 2 * product


def test_flops_list_operators(x):
    with profile_flops() as report:
        nn.Sequential(nn.Linear(4, 4), nn.ReLU())(x)
    assert report.by_operator == {"aten.addmm.default": 64}
    assert report.uncounted["aten.relu.default"] == 1
    assert report.to_dict()["uncounted"] == report.uncounted


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("overload", [False, True])
def test_own_formula_comes_before_torchs(x, overload, watched):
    operator = torch.ops.aten.mm.default if overload else torch.ops.aten.mm
    formulas = {operator: lambda first, second, out_shape: 1000 * first[0]}
    with nullcontext() if watched else OtherMode(), profile_flops(formulas=formulas) as report:
        torch.mm(x, torch.ones(4, 4))
    assert report.by_operator == {"aten.mm.default": 2000}


class OtherMode(TorchDispatchMode):
    """A user's mode; operators inside a mode are not observed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_formula_of_an_overload_replaces_its_operators(x):
    """An overload's formula is preferred, in either order of `formulas`."""
    formulas = {
        torch.ops.aten.sin.default: lambda *shapes, out_shape: 1,
        torch.ops.aten.sin: lambda *shapes, out_shape: 2,
    }
    for given in (formulas, dict(reversed(formulas.items()))):
        with profile_flops(formulas=given) as report:
            torch.sin(x)
        assert report.total == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_flops_do_not_depend_on_the_type(dtype):
    with profile_flops() as report:
        nn.Linear(4, 4, dtype=dtype)(torch.ones(3, 4, dtype=dtype)).sum().backward()
    assert (report["Linear"].forward, report["Linear"].backward) == (96, 96)


def test_empty_batch_has_no_flops():
    with profile_flops() as report:
        nn.Linear(4, 4)(torch.ones(0, 4))
    assert (report.total, report.by_operator) == (0, {"aten.addmm.default": 0})


def test_interrupt_in_a_formula_reaches_the_caller(x):

    def formula(*shapes, out_shape):
        raise KeyboardInterrupt

    layer = nn.Linear(4, 4, bias=False)
    with pytest.raises(KeyboardInterrupt), profile_flops(formulas={torch.ops.aten.mm: formula}):
        layer(x)
    assert mode_depth() == 0
    with profile_flops() as report:
        layer(x)
    assert report.total == 64


def test_error_in_a_branch_keeps_what_was_counted(x):

    def fails(y):
        torch.mm(y, torch.ones(4, 4))
        raise ZeroDivisionError

    with profile_flops() as report:
        nn.Linear(4, 4, bias=False)(x)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            torch.ops.higher_order.cond(torch.tensor(True), fails, torch.sin, (x.detach(),))
        nn.Linear(4, 4, bias=False)(x)
    assert report.total == 3 * 64
    assert report.sum("self_total") == report.total
