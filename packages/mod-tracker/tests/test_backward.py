"""Hooks for backward events: where they are attached, and when they are freed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._tools.mod_tracker import ModTracker as TorchTracker

from mod_tracker import ModTracker, _torch_compat
from mod_tracker._events import PRUNE_EVERY


def test_no_hooks_without_a_backward_listener(mlp, x):
    """Forward hooks add nothing to the graph; backward hooks add hooks at boundaries."""
    tracker = ModTracker()
    with tracker:
        tracker.register_user_hooks(pre_fw_hook=lambda *_: None)
        assert not mlp(x).grad_fn.metadata
        tracker.register_user_hooks(pre_bw_hook=lambda *_: None)
        assert mlp(x).grad_fn.metadata


def test_run_of_a_failed_backward_is_dropped(x):

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError

    tracker, model = ModTracker(), nn.Tanh()
    tracker.register_user_hooks(pre_bw_hook=lambda *_: None)
    with tracker:
        out = model(Fails.apply(x)).sum()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^$"):
                out.backward(retain_graph=True)
            assert tracker._events.passes == {}


class Split(nn.Module):
    """Three outputs of one node."""

    def forward(self, x):
        return x.unbind()


class Joined(nn.Module):
    """Uses the last two of the three outputs, the last one first."""

    def __init__(self):
        super().__init__()
        self.split, self.relu, self.tanh = Split(), nn.ReLU(), nn.Tanh()

    def forward(self, x):
        _, middle, last = self.split(x)
        return self.tanh(last) + self.relu(middle)


def events_of(kind, step):
    """Return the backward events of a step as text, with their gradients."""
    tracker, events = kind(), []

    def write(sign):
        def hook(module, grads):
            if isinstance(grads[0], list):  # torch nests the gradients of inputs
                (grads,) = grads
            given = [None if grad is None else grad.sum().item() for grad in grads]
            events.append((f"{sign}{tracker.get_known_fqn(module)}", given))

        return hook

    tracker.register_user_hooks(None, None, write("+"), write("-"))
    with tracker:
        step()
    return events


@pytest.mark.parametrize("in_mode", [True, False])
def test_outputs_of_one_node_have_torchs_events(monkeypatch, in_mode):
    """Events have torch's order and gradients, with both ways to hook a node."""
    monkeypatch.setattr(_torch_compat, "in_function_mode", lambda: in_mode)
    model, x = Joined(), torch.randn(3, 4, requires_grad=True)

    def step():
        model(x * 1).sum().backward()

    expected = events_of(TorchTracker, step)
    assert events_of(ModTracker, step) == expected
    assert ("+Joined.split", [None]) in expected


def test_grad_of_a_tensor_between_modules_reaches_both():
    """torch.autograd.grad for it leaves the module that used it, with the gradient, as in torch.

    The module that made it is entered, since the gradient of its output is available. It is left at
    the end, since the gradients of its inputs are never computed.
    """
    first, second = nn.Linear(4, 4), nn.Tanh()
    x = torch.randn(2, 4, requires_grad=True)
    found = []

    def step():
        between = first(x * 1)
        found.append(torch.autograd.grad(second(between).sum(), between)[0].sum().item())

    events = events_of(ModTracker, step)
    assert events == [
        ("+Tanh", [8.0]),
        ("+Linear", found),
        ("-Tanh", found),
        ("-Linear", [None]),
    ]
    expected = events_of(TorchTracker, step)
    assert events[:3] == expected


def test_tensors_carry_no_hooks(mlp, x):
    """Saving a tensor does not warn, and only the user's own hooks are on it."""
    tracker = ModTracker()
    tracker.register_user_hooks(pre_bw_hook=lambda *_: None)
    with tracker:
        y = mlp(x)
    assert y._backward_hooks is None
    y.register_hook(lambda grad: None)
    assert len(y._backward_hooks) == 1
    y.sum().backward()


class Scale(nn.Module):
    """Returns its parameter, alone or in a list."""

    def __init__(self, wrap):
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.ones(4)), wrap

    def forward(self):
        return self.wrap(self.weight)


class Scaled(nn.Module):
    """Multiplies by the result of its part."""

    def __init__(self, wrap):
        super().__init__()
        self.scale = Scale(wrap)

    def forward(self, x):
        scale = self.scale()
        return x * (scale[0] if isinstance(scale, list) else scale)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value]])
def test_module_that_returns_a_leaf_is_not_entered(kept, wrap, log_events):
    model, tracker = Scaled(wrap), ModTracker()
    node = torch.autograd.graph.get_gradient_edge(model.scale.weight).node if kept else None
    events = log_events(tracker)
    with tracker:
        for _ in range(3):
            events.clear()
            model(torch.ones(4)).sum().backward()
            assert [e for e in events if "bw" in e] == ["+bw Scaled", "-bw Scaled"]
    assert not kept or not node.metadata


def test_modules_sharing_an_input_are_left_with_its_gradient(x):
    tracker, left = ModTracker(), []
    tracker.register_user_hooks(post_bw_hook=lambda _, grads: left.append((tracker.current, grads)))
    count = 3 * PRUNE_EVERY
    layers = nn.ModuleList(nn.Tanh() for _ in range(count))
    with tracker:
        shared = x * 2
        sum(layer(shared) for layer in layers).sum().backward()
    assert len(left) == count
    assert all(grads[0] is not None for _, grads in left)


def test_hooks_of_dead_calls_are_pruned_at_a_living_node(x):
    tracker = ModTracker()
    tracker.register_user_hooks(post_bw_hook=lambda *_: None)
    shared, layer = x * 2, nn.Tanh()
    with tracker:
        for _ in range(10 * PRUNE_EVERY):
            layer(shared)
    (edge_hook,) = shared.grad_fn.metadata.values()
    assert len(edge_hook) <= 2 * PRUNE_EVERY
