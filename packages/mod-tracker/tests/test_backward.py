"""What is attached for backward events, and what goes."""

from __future__ import annotations

import torch
from torch import nn

from mod_tracker import ModTracker
from mod_tracker._backward import PRUNE_EVERY


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
