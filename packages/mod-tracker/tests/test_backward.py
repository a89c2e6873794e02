"""What is attached for backward events, and what goes."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed._tools.mod_tracker import ModTracker as TorchTracker

from mod_tracker import ModTracker
from mod_tracker._backward import PRUNE_EVERY, BackwardPass, _forget_one_failed, _is_dead
from mod_tracker._torch_compat import _graph, hook_gradient


def test_nothing_is_attached_without_a_listener_for_backward(mlp, x):
    """Forward listeners leave the graph alone; backward ones mark the nodes at the boundary."""
    tracker = ModTracker()
    with tracker:
        with tracker.subscribe(pre_forward=lambda *_: None):
            assert not mlp(x).grad_fn.metadata
        with tracker.subscribe(pre_backward=lambda *_: None):
            assert mlp(x).grad_fn.metadata


def test_inputs_are_left_alone_where_nobody_asks_when_a_module_is_left(mlp, x):
    """That it is entered is told at its outputs."""
    tracker, y, entered = ModTracker(), x * 1, []
    with tracker, tracker.subscribe(pre_backward=lambda call, _: entered.append(call.name)):
        mlp(y).sum().backward()
    assert not y.grad_fn.metadata
    assert set(entered) == {"MLP", "MLP.a", "MLP.b"}


def test_a_node_that_outlives_graphs_does_not_fill_up(x):
    """The node of a leaf that is kept alive is rid of calls whose graphs are gone."""
    node = torch.autograd.graph.get_gradient_edge(x).node
    tracker, model = ModTracker(), nn.Tanh()
    with tracker, tracker.subscribe(post_backward=lambda *_: None):
        for _ in range(10 * PRUNE_EVERY):
            model(x)
    (edge_hook,) = node.metadata.values()
    assert len(edge_hook) <= PRUNE_EVERY + 1


def test_run_of_a_failed_backward_is_dropped(x):
    """What a failed backward had collected goes with the engine's work."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError

    tracker, model = ModTracker(), nn.Tanh()
    with tracker, tracker.subscribe(pre_backward=lambda *_: None):
        out = model(Fails.apply(x)).sum()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^$"):
                out.backward(retain_graph=True)
            assert tracker._backward.passes == {}


@pytest.mark.parametrize("inner", [False, True])
def test_failed_backward_of_another_thread_is_over_where_it_is_known_what_runs(x, inner):
    """A device's thread ran it: whoever called it goes on from here, and only that one knows."""
    tracker, heard = ModTracker(), []
    with tracker, tracker.on_switch(lambda call, phase: heard.append((call, phase))):
        nn.Tanh()(x)
        heard.clear()
        backward = tracker._backward
        backward.attribution.state().inner = inner
        ran = backward.passes[7] = BackwardPass()
        ran.thread = -1
        _forget_one_failed(weakref.ref(backward), 7, None)
        assert backward.passes == {}
    assert heard == ([] if inner else [(None, "outside")])


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
    """Return backward events of a step as text, with the gradients they were given."""
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
def test_several_outputs_of_a_node_are_told_apart_as_torch_does(monkeypatch, in_mode):
    """Events come in torch's order and with torch's gradients, by either way to hook a node."""
    monkeypatch.setattr(_graph, "in_function_mode", lambda: in_mode)
    model, x = Joined(), torch.randn(3, 4, requires_grad=True)

    def step():
        model(x * 1).sum().backward()

    expected = events_of(TorchTracker, step)
    assert events_of(ModTracker, step) == expected
    assert ("+Joined.split", [None]) in expected


def test_grad_of_a_tensor_between_modules_reaches_both():
    """torch.autograd.grad for it leaves the module it went into, with the gradient, as in torch.

    The module that made it is entered, since the gradient of its output is there, and left at the
    end, since those of its inputs never come.
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


def test_nothing_of_the_hooks_is_seen_on_tensors(mlp, x):
    """The tensors carry no hooks: saving one does not warn, and the user's own come alone."""
    tracker = ModTracker()
    with tracker, tracker.subscribe(pre_backward=lambda *_: None):
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
    """Multiplies by what the part returns."""

    def __init__(self, wrap):
        super().__init__()
        self.scale = Scale(wrap)

    def forward(self, x):
        scale = self.scale()
        return x * (scale[0] if isinstance(scale, list) else scale)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value]])
def test_module_that_returns_a_leaf_is_not_entered(kept, wrap, log_events):
    """Whether something keeps the leaf's node, as distributed training does, or not: no growth."""
    model, tracker = Scaled(wrap), ModTracker()
    node = torch.autograd.graph.get_gradient_edge(model.scale.weight).node if kept else None
    events = log_events(tracker)
    with tracker:
        for _ in range(3):
            events.clear()
            model(torch.ones(4)).sum().backward()
            assert [e for e in events if "bw" in e] == ["+bw Scaled", "-bw Scaled"]
    assert not kept or not node.metadata


def test_many_modules_that_read_one_tensor_are_all_left_with_its_gradient(x):
    """However many stand at a node, none that will run in backward is forgotten."""
    tracker, left = ModTracker(), []
    tracker.subscribe(post_backward=lambda call, grads: left.append((call.name, grads)))
    count = 3 * PRUNE_EVERY
    layers = nn.ModuleList(nn.Tanh() for _ in range(count))
    with tracker:
        shared = x * 2
        sum(layer(shared) for layer in layers).sum().backward()
    assert len(left) == count
    assert all(grads[0] is not None for _, grads in left)


def test_forwards_without_a_backward_do_not_pile_up_at_a_node_that_is_kept(x):
    """What stands there for calls whose graph is gone is removed now and then."""
    tracker = ModTracker()
    tracker.subscribe(post_backward=lambda call, grads: None)
    shared, layer = x * 2, nn.Tanh()
    with tracker:
        for _ in range(10 * PRUNE_EVERY):
            layer(shared)
    (edge_hook,) = shared.grad_fn.metadata.values()
    assert len(edge_hook) <= 2 * PRUNE_EVERY


def test_a_node_that_many_modules_share_is_searched_only_now_and_then(monkeypatch, x):
    """What a module call costs does not grow with the calls that were given the same input."""
    looked, count, y = [], 8 * PRUNE_EVERY, x * 1

    def counted(entry):
        looked.append(entry)
        return _is_dead(entry)

    monkeypatch.setattr("mod_tracker._backward._is_dead", counted)
    with ModTracker() as tracker:
        tracker.register_user_hooks(post_bw_hook=print)
        layer = nn.ReLU()
        kept = [layer(y) for _ in range(count)]
    assert len(kept) < len(looked) <= count * count // PRUNE_EVERY


def test_a_node_has_one_hook_for_changes_of_the_running_call(monkeypatch, x):
    """However many modules are given its tensor, or return it; nothing piles up at it."""
    hooked = []

    def counted(node, *rest):
        hooked.append(node)
        hook_gradient(node, *rest)

    monkeypatch.setattr("mod_tracker._backward.hook_gradient", counted)
    tracker, one, other, layer = ModTracker(), x * 2, x * 3, nn.Sequential(nn.Tanh())
    with tracker, tracker.on_switch(lambda call, phase: None):
        for _ in range(4):
            layer(one), layer(other)
    assert [hooked.count(shared.grad_fn) for shared in (one, other)] == [1, 1]
    assert len(hooked) == 2 + 8


def test_nodes_whose_hooks_are_forgotten_are_hooked_again(monkeypatch, x):
    """What is remembered is bounded; a second hook tells of no other change."""
    monkeypatch.setattr("mod_tracker._backward.KEPT_NUMBERS", 3)
    told = []
    for count in (1, 5):
        told.append([])
        tracker, shared = ModTracker(), x * 2
        with tracker, tracker.on_switch(lambda call, phase: told[-1].append((call, phase))):
            outputs = [nn.Tanh()(shared) for _ in range(count)]
            outputs.append(nn.Sigmoid()(shared))
            assert len(tracker._attribution.state().watched) <= 3
            told[-1].clear()
            outputs[-1].sum().backward()
    once, again = [[(call and call.name, phase) for call, phase in turn] for turn in told]
    assert list(dict.fromkeys(again)) == list(dict.fromkeys(once))


def test_changes_are_seen_with_threads_whose_nodes_have_the_same_numbers(x):
    """Numbers are of one thread: where several run modules, the node itself is asked."""
    tracker, found = ModTracker(), []
    with tracker, tracker.on_switch(lambda call, phase: found.append((call and call.name, phase))):
        thread = threading.Thread(target=nn.ReLU(), args=(torch.ones(1),))
        thread.start()
        thread.join()
        assert tracker._attribution.state() is None
        output = nn.Tanh()(x * 2)
        found.clear()
        output.sum().backward()
    assert found[:2] == [("Tanh", "backward"), (None, "backward")]
    assert output.grad_fn.metadata


def test_a_probe_is_waited_for(monkeypatch):
    """Its thread has an answer once it is waited for, and no sooner."""
    waited_for = threading.Event()

    class Waiting(threading.Thread):
        def join(self, timeout=None):
            waited_for.set()
            super().join(timeout)

    monkeypatch.setattr(_graph, "threading", SimpleNamespace(Thread=Waiting))
    try:
        assert _graph.in_fresh_thread(lambda: waited_for.wait(30)) is True
    finally:
        waited_for.set()
