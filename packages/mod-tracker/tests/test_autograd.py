"""Gradients by autograd functions and transforms, and the records that they leave."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker


@pytest.mark.parametrize("name", ["vjp", "jacrev"])
def test_functional_reverse_mode_gives_the_same_values(name, mlp, x, log_events):
    """torch.func.vjp and jacrev work with hooks registered and give bit-identical results."""
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
    """grad, vmap, per-sample gradients and jvp work and give bit-identical results."""
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


def test_inference_keeps_nothing():
    """10,000 forwards without gradients leave no record, and no event in the next backward."""
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


def test_activations_die_by_reference_count(mlp, x, log_events):
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
