"""A recomputed module has the stack and the FLOPs of its forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from mod_tracker import ModTracker, profile_flops, profile_time, trace

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


class Tape:
    """Recomputes operators with gradients disabled, and says so as other libraries may.

    Args:
        numbered: whether it names the node that an operator created in the forward.
    """

    def __init__(self, *, numbered):
        self.numbered = numbered

    @staticmethod
    def announced(number, function):
        callbacks = getattr(torch.autograd.graph, "recompute_callbacks", ())
        for callback in callbacks:
            callback(number)
        try:
            return function()
        finally:
            for callback in callbacks:
                callback(None)

    def checkpoint(self, a, b, x):
        """Return `b(a(x).tanh())`; the result of the tanh is made again in backward."""
        made = a(x)
        number = torch._C._autograd._get_sequence_nr() - 1 if self.numbered else -1
        values = x.detach(), a.weight.detach()

        def again(kept):
            if kept is not None:
                return kept
            run = lambda: torch.mm(values[0], values[1].t()).tanh()  # noqa: E731
            inner = lambda: self.announced(number, run)  # noqa: E731
            with torch.no_grad():
                return self.announced(-1, inner)

        def pack(saved):
            return None if saved.shape == made.shape else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, again):
            return b(made.tanh())


class Taped(nn.Module):
    def __init__(self, *, numbered):
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.tape = Tape(numbered=numbered)

    def forward(self, x):
        return self.tape.checkpoint(self.a, self.b, x)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("options", [{}, {"retain_graph": True}, {"create_graph": True}])
@pytest.mark.parametrize("numbered", [True, False])
def test_announced_recompute_without_gradients(log_ops, numbered, options):
    """It is no part of the backward, and belongs to the module that made the node, if named."""
    model = Taped(numbered=numbered)
    x = torch.randn(2, 4)
    entries = log_ops(ModTracker(), lambda: model(x).sum().backward(**options))
    again = [entry for entry in entries if entry[0] == RE]
    owner = "Taped.a" if numbered else "Taped.b"
    # b's product saves the result of the tanh, and so does the tanh.
    assert again[:2] == [(RE, "mm", ("Taped", owner)), (RE, "tanh", ("Taped", owner))]
    assert [name for _, name, _ in again] == ["mm", "tanh"] * 2
    backward = [name for phase, name, _ in entries if phase == BW]
    assert backward.count("mm") == 3  # x needs no gradient
    assert not hasattr(torch.autograd.graph, "recompute_callbacks")


def test_announced_recompute_takes_its_time(clock, monkeypatch):
    """A time report sees it without any module call."""
    model, announced = Taped(numbered=True), Tape.announced

    def slowly(number, function):
        return announced(number, lambda: (clock.passes(5), function())[1])

    monkeypatch.setattr(Tape, "announced", staticmethod(slowly))
    with profile_time() as report:
        model(torch.randn(2, 4)).sum().backward()
    assert report.sum("self_recompute") == 2 * (5 + 5)
    assert report["a"].recompute == 2 * 5
    assert report.total == 2 * (5 + 5)


def test_recompute_that_fails_has_ended():
    model, tracker = Taped(numbered=True), ModTracker()
    with tracker:
        with pytest.raises(ZeroDivisionError):
            Tape.announced(-1, lambda: 1 / 0)
        assert tracker.phase == "outside"
        with profile_flops() as report:  # trackers beside each other
            model(torch.randn(2, 4)).sum().backward()
    assert report.sum("self_recompute") == 2 * 64


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_checkpointed_function_without_modules(x, log_ops, retain_graph, create_graph):
    """torch's checkpoint is known by its hooks, so other options of a backward do not matter."""

    def step():
        weight = torch.ones(4, 4, requires_grad=True)
        out = checkpoint(lambda x: (x @ weight).tanh() @ weight, x, use_reentrant=False)
        out.sum().backward(retain_graph=retain_graph, create_graph=create_graph)

    names = [name for phase, name, _ in log_ops(ModTracker(), step) if phase == RE]
    assert names.count("mm") >= 1
    backward = [name for phase, name, _ in log_ops(ModTracker(), step) if phase == BW]
    assert backward.count("mm") == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_inside_a_recomputed_module_is_repeated_too(x, use_reentrant):
    """Forces of a potential: the forward takes a gradient, and so does the recompute."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            with torch.enable_grad():
                y = x * 1 if x.requires_grad else x.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.energy(y).tanh().sum(), y, create_graph=True)
            return self.energy(force)

    model = Forces()
    with profile_flops() as plain:
        model(x).sum().backward()
    with profile_flops() as report:
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert report.model_flops == plain.model_flops
    assert report.sum("self_recompute") > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_function_without_modules_takes_its_time(clock, use_reentrant):
    """The recomputed function is timed apart from the backward through it."""

    class Goes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            clock.passes(5)
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (_,) = ctx.saved_tensors
            clock.passes(3)
            return grad

    class Caller(nn.Module):
        def forward(self, x):
            return checkpoint(lambda x: Goes.apply(x).exp(), x, use_reentrant=use_reentrant) * 1

    x = torch.ones(2, requires_grad=True)
    model = nn.Sequential(Caller())
    with profile_time() as report, trace() as timeline:
        model(x).sum().backward()
    for each in (report, timeline):
        row = each["0"]
        assert (row.forward, row.recompute, row.backward) == (5, 5, 3)
    assert {event["cat"] for event in timeline.events} == {"forward", "recompute", "backward"}
    assert not hasattr(torch.autograd.graph, "recompute_callbacks")


def test_checkpoint_is_patched_inside_the_block_only(x):
    kinds = (torch_checkpoint.CheckpointFunction, torch_checkpoint._recomputation_hook)
    before = [dict(vars(kind)) for kind in kinds]
    outer, inner, heard = ModTracker(), ModTracker(), []
    torch.autograd.graph.recompute_callbacks = (heard.append,)  # another library's
    try:
        with outer:
            with inner:
                assert [dict(vars(kind)) for kind in kinds] != before
            checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
        assert torch.autograd.graph.recompute_callbacks == (heard.append,)
    finally:
        del torch.autograd.graph.recompute_callbacks
    assert [dict(vars(kind)) for kind in kinds] == before
    assert heard == [-1, None]
