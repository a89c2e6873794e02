"""The autograd graph: numbers, the running node, hooks on nodes, and what is done without them."""

from __future__ import annotations

import contextlib
import importlib.util
import threading

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import mod_tracker._attribution as attribution
import mod_tracker._torch_compat as compat
import mod_tracker._tracker as tracker_file
from mod_tracker import ModTracker
from mod_tracker._torch_compat import _graph, _look_up


@pytest.mark.parametrize(
    "broken",
    [
        (None, compat.graph_task, compat.current_node),
        (lambda: 7, compat.graph_task, compat.current_node),
        (compat.next_number, lambda: 3, compat.current_node),
        (compat.next_number, compat.graph_task, lambda: None),
    ],
)
def test_probe_refuses_functions_that_do_not_tell_the_truth(broken):
    """A missing function, a constant, a wrong id, no node: each is noticed."""
    assert compat.probe(compat.next_number, compat.graph_task, compat.current_node)
    assert not compat.probe(*broken)


class DropsHooks(torch.Tensor):
    """Carries nothing: what is put on it is not there when a node looks."""

    @property
    def _backward_hooks(self):
        return None

    @_backward_hooks.setter
    def _backward_hooks(self, hooks):
        pass


def test_carrying_hooks_is_refused_where_it_does_not_work():
    """A tensor that drops hooks, no tensor, another type of leaf node, no word of modes."""
    leaf_node, in_mode = compat.LEAF_NODE, _graph._function_mode
    assert compat.carries(torch.empty(0), leaf_node, in_mode)
    assert not compat.carries(torch.empty(0).as_subclass(DropsHooks), leaf_node, in_mode)
    assert not compat.carries(object(), leaf_node, in_mode)
    assert not compat.carries(torch.empty(0), None, in_mode)
    assert not compat.carries(torch.empty(0), leaf_node, None)


def test_carrying_hooks_needs_the_running_node(monkeypatch):
    """Where backward attribution does not work, the short way is not taken."""
    monkeypatch.setattr(_graph, "current_node", _graph._no_node)
    assert not compat.carries(torch.empty(0), compat.LEAF_NODE, _graph._function_mode)


class Raises(torch.Tensor):
    """Raises when hooks are put on it."""

    error: type[Exception]

    @property
    def _backward_hooks(self):
        return None

    @_backward_hooks.setter
    def _backward_hooks(self, hooks):
        raise self.error


@pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError])
def test_torch_that_raises_is_not_relied_on(error):
    """Whatever a private function of another torch raises, importing the package does not."""

    def refuse():
        raise error

    kind = type("Refused", (Raises,), {"error": error})
    assert not compat.carries(
        torch.empty(0).as_subclass(kind), compat.LEAF_NODE, _graph._function_mode
    )
    assert not compat.probe(refuse, compat.graph_task, compat.current_node)


@pytest.mark.parametrize("in_mode", [True, False])
def test_gradient_hook_is_called_for_its_output_alone(monkeypatch, in_mode):
    """First, later and leaf outputs: each hook gets its own gradient, by either way, once."""
    monkeypatch.setattr(_graph, "in_function_mode", lambda: in_mode)
    x, grads = torch.ones(2, requires_grad=True), {}
    first, second = (x * 1).unbind()
    leaf = torch.autograd.graph.get_gradient_edge(x).node
    for name, node, output in (("0", first.grad_fn, 0), ("1", first.grad_fn, 1), ("x", leaf, 0)):
        grads[name] = []
        compat.hook_gradient(node, output, compat.new_carrier(), grads[name].append)
    (2 * first + 3 * second).backward()
    assert {name: [grad.tolist() for grad in given] for name, given in grads.items()} == {
        "0": [2.0],
        "1": [3.0],
        "x": [[2.0, 3.0]],
    }
    assert first._backward_hooks is None


class Refuses(TorchFunctionMode):
    """Raises at every function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise ZeroDivisionError


def test_function_modes_are_not_asked_for_hooks():
    """A mode that would raise hears nothing of a hook."""
    x, calls = torch.ones(1, requires_grad=True), []
    y = x * 2
    node = y.grad_fn
    with Refuses():
        compat.hook_gradient(node, 0, compat.new_carrier(), calls.append)
    y.backward()
    assert len(calls) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode, torch.no_grad])
def test_carrier_is_made_out_of_sight_of_modes(mode):
    """It is a plain tensor, whatever mode is on when a thread is seen for the first time."""
    with mode():
        carrier = compat.new_carrier()
    assert type(carrier) is nn.Parameter
    assert not carrier.is_inference()
    assert compat.carries(carrier, compat.LEAF_NODE, _graph._function_mode)


def test_number_is_the_creation_order():
    """A node's number is what the counter said before."""
    x = torch.ones(1, requires_grad=True)
    expected = compat.next_number()
    assert compat.number_of((x * 2).grad_fn) == expected
    assert compat.next_number() == expected + 1


def test_accumulation_nodes_are_unnumbered():
    """The bound separates them from every other node."""
    x = torch.ones(1, requires_grad=True)
    node = (x * 2).grad_fn
    assert compat.number_of(node) < compat.UNNUMBERED
    assert compat.number_of(node.next_functions[0][0]) >= compat.UNNUMBERED


def test_callback_runs_at_the_end_of_a_backward_only():
    """Within a backward it is queued; outside it is refused."""
    x, calls = torch.ones(1, requires_grad=True), []
    assert not compat.at_backward_end(lambda: calls.append("never"))
    y = x * 2
    y.register_hook(lambda _: compat.at_backward_end(lambda: calls.append("end")) and None)
    x.register_hook(lambda _: calls.append("leaf"))
    y.sum().backward()
    assert calls == ["leaf", "end"]


def test_without_private_names_forward_is_complete(monkeypatch, mlp, x):
    """The fallbacks: the stack in forward, and no backward."""
    for module in (attribution, tracker_file):
        monkeypatch.setattr(module, "graph_task", _graph._no_task)
    monkeypatch.setattr(attribution, "current_node", _graph._no_node)
    tracker, stacks = ModTracker(), []
    mlp.a.register_forward_hook(lambda *_: stacks.append(tracker.stack) or None)
    with tracker:
        y = mlp(x)
        y.register_hook(lambda _: stacks.append((tracker.stack, tracker.is_bw)))
        y.sum().backward()
    assert stacks == [("MLP", "MLP.a"), ((), False)]
    assert (_graph._no_node(), _graph._constant_number()) == (None, 0)


def test_node_creation_hook_tags_what_a_backward_creates(monkeypatch, x):
    """With torch >= 2.14's hook, or a stand-in for it, nodes made in backward know their maker."""
    hooks = []

    @contextlib.contextmanager
    def stand_in(callback):
        hooks.append(callback)
        yield
        hooks.remove(callback)

    monkeypatch.setattr(torch.autograd.graph, "node_creation_hook", stand_in, raising=False)
    tracker = ModTracker(higher_order=True)
    model, seen = nn.Sequential(nn.Tanh()), []
    with tracker:
        y = model(x)
        grad = torch.autograd.grad(y.sum(), x, create_graph=True)[0]

        def call_with_events(node):
            for hook in hooks:
                hook(node)

        # The stand-in is told by hand, inside a second backward, of the first one's node.
        y.register_hook(lambda _: call_with_events(grad.grad_fn))
        y.sum().backward(retain_graph=True)
        grad.register_hook(lambda _: seen.append(tracker.stack))
        grad.sum().backward()
    assert seen == [("Sequential", "Sequential.0")]
    assert hooks == []


def test_node_creation_hook_is_optional(monkeypatch):
    """Without it the option does nothing."""
    monkeypatch.delattr(torch.autograd.graph, "node_creation_hook", raising=False)
    assert compat.node_creation_hook(print) is None
    with ModTracker(higher_order=True) as tracker:
        nn.ReLU()(torch.ones(1))
    assert tracker.parents == {"Global"}


def imported_again():
    """What an import of the file finds here and now; nobody else gets to see it."""
    spec = importlib.util.spec_from_file_location(f"{_graph.__package__}._again", _graph.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_hook(run):
    """Call something in the middle of a backward."""
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda _: run() and None)
    y.backward()


def inside(context):
    """A function that calls another inside a context."""

    def enter(run):
        with context():
            run()

    return enter


WAYS_TO_IMPORT = {
    "inference": inside(torch.inference_mode),
    "no_grad": inside(torch.no_grad),
    "fake": inside(FakeTensorMode),
    "meta": inside(lambda: torch.device("meta")),
    "refusing": inside(lambda: Refuses()),
    "backward": in_hook,
    "vmap": lambda run: torch.func.vmap(lambda x: (run(), x)[1])(torch.ones(2)),
    "grad": lambda run: torch.func.grad(lambda x: (run(), x)[1])(torch.tensor(1.0)),
}


@pytest.mark.parametrize("way", WAYS_TO_IMPORT)
def test_first_import_may_be_anywhere(way):
    """What torch can do is found out of sight of modes, and out of a backward that runs."""
    found = []
    WAYS_TO_IMPORT[way](lambda: found.append(imported_again()))
    assert (found[0].EXACT_BACKWARD, found[0].CARRIES) == (True, True)
    assert type(found[0]._EMPTY) is torch.Tensor
    assert not found[0]._EMPTY.is_inference()


def test_where_no_thread_starts_torch_is_tried_in_this_one(monkeypatch):
    """As of a process that may have no more of them; importing does not fail."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert imported_again().EXACT_BACKWARD


def test_threads_of_the_import_have_ended():
    """None is left to run beside the user's own."""
    before = threading.active_count()
    imported_again()
    assert threading.active_count() == before


def test_several_hooks_of_one_output_are_called_in_their_order():
    """One carrier brings them all, and keeps none of them for the next node."""
    x, carrier, calls = torch.ones(1, requires_grad=True), compat.new_carrier(), []
    first, second = x * 2, x * 3
    for name in "ab":
        compat.hook_gradient(first.grad_fn, 0, carrier, lambda _, name=name: calls.append(name))
    compat.hook_gradient(second.grad_fn, 0, carrier, lambda _: calls.append("c"))
    first.backward(retain_graph=True)
    assert calls == ["a", "b"]
    second.backward()
    assert calls == ["a", "b", "c"]
    first.backward()
    assert calls == ["a", "b", "c", "a", "b"]


def test_hook_of_a_gradient_is_called_by_grad_and_with_undefined_ones():
    """`torch.autograd.grad` for that very output; None where nothing arrives at it."""
    x, given = torch.ones(2, requires_grad=True), []
    y = x * 1
    compat.hook_gradient(y.grad_fn, 0, compat.new_carrier(), given.append)
    torch.autograd.grad(y.sum(), y)
    first = y.unbind()[0]
    compat.hook_gradient(first.grad_fn, 1, compat.new_carrier(), given.append)
    first.backward()
    assert [None if grad is None else grad.tolist() for grad in given] == [
        *([1.0, 1.0], None, [1.0, 0.0])
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_gradient_of_any_dtype_and_shape_is_given(dtype, shape):
    """The carrier is a tensor of floats without elements, whatever the node's are."""
    x, given = torch.ones(shape, dtype=dtype, requires_grad=True), []
    y = x * 2
    compat.hook_gradient(y.grad_fn, 0, compat.new_carrier(), given.append)
    y.backward(torch.ones(shape, dtype=dtype))
    assert [(grad.dtype, grad.shape) for grad in given] == [(dtype, y.shape)]


def test_what_a_hook_raises_reaches_the_caller_of_backward():
    """By either way, and the next backward is as ever."""
    x = torch.ones(2, requires_grad=True)

    def fail(grad):
        raise KeyboardInterrupt

    for output in (0, 1):
        parts = (x * 1).unbind()
        compat.hook_gradient(parts[0].grad_fn, output, compat.new_carrier(), fail)
        with pytest.raises(KeyboardInterrupt):
            parts[output].backward()
        assert compat.graph_task() == compat.NO_TASK
    assert torch.autograd.grad((x * 3).sum(), x)[0].tolist() == [3.0, 3.0]


def test_callback_of_a_backward_that_fails_is_never_called():
    """Not by the next one either, and of a backward in another it is that one's end."""
    x, calls = torch.ones(1, requires_grad=True), []

    def fail(_):
        assert compat.at_backward_end(lambda: calls.append("failed"))
        raise ValueError("no")

    y = x * 2
    y.register_hook(fail)
    with pytest.raises(ValueError, match="no"):
        y.backward()
    inner, outer = x * 3, x * 4
    inner.register_hook(lambda _: compat.at_backward_end(lambda: calls.append("inner")) and None)
    outer.register_hook(lambda _: (inner.backward(), calls.append("outer"))[0])
    outer.backward()
    assert calls == ["inner", "outer"]


def test_without_a_queue_no_callback_is_taken(monkeypatch):
    """The one who asks is told so, and can do without."""
    x, taken = torch.ones(1, requires_grad=True), []
    monkeypatch.setattr(_graph, "look_up", lambda name: None)
    y = x * 2
    y.register_hook(lambda _: taken.append(compat.at_backward_end(lambda: taken.append("never"))))
    y.backward()
    assert taken == [False]


def test_backward_and_its_node_are_known_in_it_alone():
    """Each backward has an id of its own; outside of all there is no node."""
    x, seen = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda _: seen.append((compat.graph_task(), compat.current_node())))
    for _ in range(2):
        y.backward(retain_graph=True)
    assert (compat.graph_task(), compat.current_node()) == (compat.NO_TASK, None)
    (first, node), (second, again) = seen
    assert node is again is y.grad_fn
    assert len({first, second, compat.NO_TASK}) == 3


def test_torch_without_private_names_has_neither_way(monkeypatch):
    """Importing succeeds; every mode counts as on, so that hooks go the long way."""
    monkeypatch.setattr(_look_up, "look_up", lambda name: None)
    found = imported_again()
    assert (found.EXACT_BACKWARD, found.CARRIES, found.LEAF_NODE) == (False, False, None)
    assert (found.next_number(), found.graph_task(), found.current_node()) == (0, -1, None)
    assert found.in_function_mode()
    x, given = torch.ones(1, requires_grad=True), []
    y = x * 2
    found.hook_gradient(y.grad_fn, 0, found.new_carrier(), given.append)
    y.backward()
    assert len(given) == 1
