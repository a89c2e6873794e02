"""Ways to ask autograd for gradients, and what events cost the graph."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker, profile_flops


@pytest.mark.parametrize("hooked", [False, True])
def test_autograd_grad_of_a_leaf_input_works(hooked, mlp, x, log_events):
    """torch.autograd.grad for the module's own input gives what it gives without a tracker."""
    expected = torch.autograd.grad(mlp(x).sum(), x)[0]
    tracker = ModTracker()
    events = log_events(tracker) if hooked else []
    with tracker:
        grad = torch.autograd.grad(mlp(x).sum(), x)[0]
    assert torch.equal(grad, expected)
    assert sorted(e[1:] for e in events if e[0] == "+") == sorted(
        e[1:] for e in events if e[0] == "-"
    )


def test_double_backward_is_attributed_to_the_module_that_made_it(x):
    """Nodes that the first backward creates belong to the module whose node created them."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    with profile_flops() as report:
        grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        grad.pow(2).sum().backward()
    # mm: 2*2*4*4 = 64. Forward 64 each. First backward: input gradient, 64 each. Second: of the
    # input gradient's mm both factors for layer 0; for layer 2 the weight only; then tanh leads
    # back into layer 0's forward mm: weight and input gradient.
    assert report["Sequential.0"].forward == report["Sequential.2"].forward == 64
    assert report.outside.total == 0
    assert report["Sequential.0"].backward == 64 + 128 + 128
    assert report["Sequential.2"].backward == 64 + 64


@pytest.mark.parametrize("name", ["vjp", "jacrev"])
def test_functional_reverse_mode_gives_the_same_values(name, mlp, x, log_events):
    """torch.func.vjp and jacrev work with hooks registered, and give the same bits."""
    x = x.detach()

    def run():
        if name == "jacrev":
            return torch.func.jacrev(mlp)(x)
        output, back = torch.func.vjp(mlp, x)
        return back(output)[0]

    expected = run()
    tracker = ModTracker()
    log_events(tracker)
    with tracker:
        assert torch.equal(run(), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["grad", "vmap", "per-sample", "jvp"])
def test_functional_transforms_give_the_same_values(name, mlp, x, log_events):
    """grad, vmap, per-sample gradients and jvp work, and give the same bits."""
    x, parameters = x.detach(), dict(mlp.named_parameters())
    call = torch.func.functional_call

    def loss(parameters, x):
        return call(mlp, parameters, (x,)).sum()

    def run():
        if name == "grad":
            return torch.func.grad(loss)(parameters, x)["a.weight"]
        if name == "vmap":
            return torch.func.vmap(lambda x: call(mlp, parameters, (x,)))(x)
        if name == "per-sample":
            return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["a.weight"]
        return torch.func.jvp(mlp, (x,), (x,))[1]

    expected = run()
    tracker = ModTracker()
    log_events(tracker)
    with tracker:
        assert torch.equal(run(), expected)
        assert tracker.parents == {"Global"}


def test_second_backward_has_the_same_events(log_events):
    """With retain_graph, a second backward tells the same as the first."""
    tracker, model = ModTracker(), nn.Sequential(nn.Linear(4, 4))
    events = log_events(tracker)
    with tracker:
        y = model(torch.randn(2, 4)).sum()
        events.clear()
        y.backward(retain_graph=True)
        first = list(events)
        y.backward()
    assert events == first * 2
    assert sorted(first) == [
        "+bw Sequential",
        "+bw Sequential.0",
        "-bw Sequential",
        "-bw Sequential.0",
    ]


def test_gradient_of_one_parameter_closes_what_it_opens(mlp, x, log_events):
    """autograd.grad for one weight: every module that is entered is left."""
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        torch.autograd.grad(mlp(x).sum(), [mlp.b.weight])
    assert [e for e in events if "bw" in e] == ["+bw MLP.b", "+bw MLP", "-bw MLP.b", "-bw MLP"]


def test_inference_keeps_nothing():
    """10,000 forwards without gradients leave no record, and the next backward tells no more."""
    model, x = nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(1)
    tracker, events = ModTracker(), []
    tracker.register_user_hooks(post_bw_hook=lambda m, _: events.append(m))
    with tracker:
        with torch.no_grad():
            for _ in range(10_000):
                model(x)
        assert len(tracker._attribution.state().record) == 0
        model(x.requires_grad_()).sum().backward()
    assert events == [model, model[0], model[1]] or len(events) == 3


def test_no_hook_stays_on_tensors(mlp, x, log_events):
    """1,000 forwards with hooks registered leave no hook on the input."""
    tracker = ModTracker()
    log_events(tracker)
    with tracker:
        for _ in range(1_000):
            mlp(x)
    assert not x._backward_hooks
    assert all(not p._backward_hooks for p in mlp.parameters())


def test_activations_die_by_reference_count(mlp, x, log_events):
    """With hooks registered, an activation is freed without the garbage collector."""
    tracker = ModTracker()
    log_events(tracker)
    gc.disable()
    try:
        with tracker:
            y = mlp(x)
            alive = weakref.ref(y)
            y.sum().backward()
            del y
            assert alive() is None
    finally:
        gc.enable()
