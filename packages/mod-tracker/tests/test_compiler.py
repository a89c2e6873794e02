"""The compiler's graphs: whose code a node is, and that each is seen."""

from __future__ import annotations

import torch
from torch import fx, nn

from mod_tracker._torch_compat import eager_seen, module_stack


def node_with(**meta):
    """A node of a graph that says this of itself."""
    node = fx.Graph().placeholder("x")
    node.meta.update(meta)
    return node


def test_modules_around_a_node_are_those_of_its_call():
    """By `id`, also of a call that is not the first; where the key is no number, by name only."""
    around = {"17": ("L['self'].a", nn.Linear), "18@2": ("L['self'].a.b", nn.ReLU)}
    found = ((17, "L['self'].a", nn.Linear), (18, "L['self'].a.b", nn.ReLU))
    assert module_stack(node_with(nn_module_stack=around)) == (found, True)
    named = {"L__self___a": ("L['self'].a", nn.Linear)}
    assert module_stack(node_with(nn_module_stack=named))[0][0][0] == -1


def test_a_node_of_the_backward_has_the_modules_of_its_forward():
    """And one that nobody called in a module has none."""
    around = {"17": ("L['self'].a", nn.Linear)}
    assert module_stack(node_with(fwd_nn_module_stack=around)) == (
        ((17, "L['self'].a", nn.Linear),),
        False,
    )
    assert module_stack(node_with()) == ((), False)


def test_both_graphs_are_seen_and_run(fresh_compiler):
    """That of the forward and that of the backward, each time; inputs are emptied as torch asks."""
    told = []

    def seen(graph, run):
        def call(args):
            told.append((graph, len(args)))
            out = run(args)
            assert args == []
            return out

        return call

    compiled = torch.compile(lambda x: x.sin().sum(), backend=eager_seen(seen))
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        compiled(x).backward()
        assert torch.equal(x.grad, torch.ones(3).cos())
    graphs = [graph for graph, _ in told]
    assert graphs[:2] == graphs[2:]
    assert len(set(graphs)) == 2
