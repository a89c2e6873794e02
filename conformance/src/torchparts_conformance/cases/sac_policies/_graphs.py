"""Compile a function and record its forward and backward graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import (
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)

aten = torch.ops.aten


class Graphs:
    """A backend for torch.compile that records graphs and changes nothing.

    Attributes:
        traced: one graph per compiled frame, as dynamo captured it.
        forward: forward graphs after partitioning.
        backward: backward graphs after partitioning.
        tags: (operator, recompute tag) of every forward node of the joint graphs.
    """

    def __init__(self, decompositions: Any = None) -> None:
        self.traced: list[torch.fx.GraphModule] = []
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.tags: list[tuple[str, str]] = []
        self._decompositions = decompositions

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile one frame."""
        self.traced.append(graph)
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=self._into(self.forward),
            bw_compiler=self._into(self.backward),
            partition_fn=self._partition,
            decompositions=self._decompositions,
        )

    def _into(self, graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            del inputs
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return keep

    def _partition(self, joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for node in joint.graph.nodes:
            if node.meta.get("recompute") is not None:
                self.tags.append((str(node.target), node.meta["recompute"].name))
        return min_cut_rematerialization_partition(joint, *args, **kwargs)


def count(graphs: list[torch.fx.GraphModule], op: Any) -> int:
    """Count calls of an operator, with or without a random-state wrapper."""
    return sum(
        node.target is op or op in node.args[:2] for each in graphs for node in each.graph.nodes
    )


def compile_kept(
    function: Callable[..., Any], *, fullgraph: bool = True, decompositions: Any = None
) -> tuple[Callable[..., Any], Graphs]:
    """Compile `function`; return it with the graphs that its calls produce."""
    torch.compiler.reset()
    graphs = Graphs(decompositions)
    return torch.compile(function, backend=graphs, fullgraph=fullgraph), graphs


def run_compiled(
    function: Callable[..., torch.Tensor],
    *args: torch.Tensor,
    fullgraph: bool = True,
    check: bool = True,
    decompositions: Any = None,
) -> Graphs:
    """Compile and differentiate `function`, and compare result and gradients with eager's.

    Args:
        function: function of tensors; run eagerly and compiled, from the same seed.
        args: its arguments.
        fullgraph: whether graph breaks raise.
        check: whether to compare values; False if they depend on random numbers, since compiled
            code may draw other numbers than eager code.
        decompositions: operators to trace by decomposition.
    """
    compiled, graphs = compile_kept(function, fullgraph=fullgraph, decompositions=decompositions)
    wanted, expected = _differentiate(function, args)
    got, result = _differentiate(compiled, args)
    if check:
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(got, wanted)
    return graphs


def products(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[int, int]:
    """Return the number of products in the forward and backward graph of `run_compiled`."""
    graphs, product = run_compiled(function, *args), aten.mm.default
    return count(graphs.forward, product), count(graphs.backward, product)


def _differentiate(function: Any, args: tuple[Any, ...]) -> tuple[list[Any], torch.Tensor]:
    """Run the function and call backward(), which reentrant checkpoints need, on fresh leaves."""
    torch.manual_seed(0)
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in args]
    out = function(*leaves)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    return [leaf.grad for leaf in leaves], out.detach()


def square(device: str, *, size: int = 4) -> torch.Tensor:
    """Make a (size, size) leaf."""
    return torch.randn(size, size, device=device, requires_grad=True)
