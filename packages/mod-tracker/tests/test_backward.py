"""Where tensors are found, and what is attached for backward events."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from torch import nn

from mod_tracker import ModTracker
from mod_tracker._backward import PRUNE_EVERY
from mod_tracker._edges import edges_of, tensors_in

Pair = namedtuple("Pair", "a b")


@dataclass
class Box:
    inside: object


def test_tensors_are_found_in_every_container():
    """Tuples, lists, sets, mappings, named tuples and dataclasses, nested."""
    t = [torch.ones(1) for _ in range(6)]
    value = (t[0], [t[1]], OrderedDict(x=t[2]), Pair(t[3], 1), Box(Box(t[4])), {t[5]}, None, "s")
    assert [id(found) for found in tensors_in(value)] == [id(tensor) for tensor in t]


def test_search_ends_on_values_that_contain_themselves():
    """A list in itself is no trap."""
    value = [torch.ones(1)]
    value.append(value)
    assert tensors_in(value)


def test_edges_are_distinct_and_only_of_tensors_with_gradients(x):
    """The same tensor twice is one edge; outputs of one node are told apart by position."""
    y = x * 2
    halves = torch.ones(4, requires_grad=True).split(2)
    assert len(edges_of((y, y, torch.ones(1)), {})) == 1
    assert [position for _, position in edges_of(halves, {})] == [0, 1]


def test_nothing_is_attached_without_a_listener_for_backward(mlp, x):
    """Forward listeners leave the graph alone; backward ones mark the boundary nodes."""
    tracker = ModTracker()
    with tracker:
        with tracker.subscribe(pre_forward=lambda *_: None):
            assert not mlp(x).grad_fn.metadata
        with tracker.subscribe(pre_backward=lambda *_: None):
            assert mlp(x).grad_fn.metadata


def test_a_node_that_outlives_graphs_does_not_fill_up(x):
    """The node of a leaf that is kept alive is rid of spans whose graphs are gone."""
    node = torch.autograd.graph.get_gradient_edge(x).node
    tracker, model = ModTracker(), nn.Tanh()
    with tracker, tracker.subscribe(post_backward=lambda *_: None):
        for _ in range(10 * PRUNE_EVERY):
            model(x)
    (boundary,) = node.metadata.values()
    assert len(boundary.leave) <= PRUNE_EVERY + 1


def test_run_of_a_failed_backward_is_dropped(x):
    """What a failed backward had collected goes when the thread is in forward again."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError

    tracker, model = ModTracker(), nn.Tanh()
    with tracker, tracker.subscribe(pre_backward=lambda *_: None):
        try:
            model(Fails.apply(x)).sum().backward()
        except ValueError:
            assert len(tracker._engine.backward.runs) == 1
        model(x)
        assert tracker._engine.backward.runs == {}
