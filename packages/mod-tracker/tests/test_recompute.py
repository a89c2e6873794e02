"""A recomputed module has the stack and the FLOPs of its forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mod_tracker import ModTracker, profile_flops

RE, BW = "recompute", "backward"


def test_recomputed_lambda_between_modules_belongs_to_the_caller(x, log_ops):
    """A checkpointed function that is no module."""

    class Lambda(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return checkpoint(lambda x: self.b(self.a(x).tanh()), x, use_reentrant=False)

    model = Lambda()
    entries = log_ops(ModTracker(), lambda: model(x).sum().backward())
    assert (RE, "mm", ("Lambda", "Lambda.a")) in entries
    assert {stack for phase, _, stack in entries if phase == BW} == {
        ("Lambda",),
        ("Lambda", "Lambda.a"),
        ("Lambda", "Lambda.b"),
    }


class CodeOfItsOwn(nn.Module):
    """A checkpointed region with its own products before, between and after those of its layers."""

    def __init__(self, *, use_reentrant, layers=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.use_reentrant, self.layers = use_reentrant, layers

    def region(self, x):
        """Three products, and two of layers."""
        x = x @ self.weight
        x = self.a(x).tanh() if self.layers else x
        x = (x @ self.weight).tanh()
        x = self.b(x).tanh() if self.layers else x
        return (x @ self.weight).tanh()

    def forward(self, x):
        """Checkpoint all of it."""
        return checkpoint(self.region, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_code_outside_of_modules_is_recompute(use_reentrant, layers, x):
    model, product = CodeOfItsOwn(use_reentrant=use_reentrant, layers=layers), 2 * len(x) * 16
    with profile_flops() as report:
        model(x).sum().backward()
    rows = {name: report[name] for name in report.rows}
    assert sum(row.self_forward for row in rows.values()) == (3 + 2 * layers) * product
    assert sum(row.self_recompute for row in rows.values()) == (3 + 2 * layers) * product
    assert sum(row.self_backward for row in rows.values()) == 2 * (3 + 2 * layers) * product
    for name in ("CodeOfItsOwn.a", "CodeOfItsOwn.b") if layers else ():
        assert rows[name].self_forward == product
        assert rows[name].self_recompute in (product, 2 * product)
        assert rows[name].self_backward == 2 * product
    own = rows["CodeOfItsOwn"]
    assert own.self_recompute in ((3 * product,) if not layers else (3 * product, 2 * product))
    assert own.self_backward == 6 * product


def test_recomputed_code_between_modules_is_of_their_parent(x):

    class Between(CodeOfItsOwn):
        def region(self, x):
            return self.b((self.a(x).tanh() @ self.weight).tanh())

    with profile_flops() as report:
        Between(use_reentrant=False)(x).sum().backward()
    product = 2 * len(x) * 16
    found = {name: (row.self_recompute, row.self_backward) for name, row in report.rows.items()}
    assert found == {
        "Between": (product, 2 * product),
        "Between.a": (product, 2 * product),
        "Between.b": (0, 2 * product),  # its node needs only its input
    }


def test_code_before_the_first_module_is_of_its_own_region(x):

    class Between(CodeOfItsOwn):
        def region(self, x):
            return (self.a(x).tanh() @ self.weight).tanh()

    first, second = CodeOfItsOwn(use_reentrant=False, layers=False), Between(use_reentrant=False)
    with profile_flops() as report:
        nn.Sequential(first, second)(x).sum().backward()
    product = 2 * len(x) * 16
    assert report["Sequential.0"].self_recompute == 3 * product
    assert report["Sequential.1"].self_recompute == product


@pytest.mark.parametrize("options", [{"create_graph": True}, {"retain_graph": True}])
def test_backward_that_keeps_its_graph_is_backward(options, x):
    """Gradients are enabled in a backward that creates a graph, but nothing is recomputed."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())
    with profile_flops() as report:
        torch.autograd.grad(model(x).sum(), [x, *model.parameters()], **options)
    assert report["Sequential.0"].recompute == report["Sequential"].recompute == 0
    assert report["Sequential.0"].backward == 2 * 2 * len(x) * 16
