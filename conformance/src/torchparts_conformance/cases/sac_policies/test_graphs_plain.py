"""Compiled regions without a policy: everything is recomputed, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.sac_policies._graphs import (
    aten,
    compile_kept,
    count,
    products,
    run_compiled,
    square,
)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def _product(x, y):
    return torch.sigmoid(torch.matmul(x, y))


@requirement(
    "SP-001",
    "A checkpointed function MUST be recomputed in the compiled backward, with each of its "
    "products run once more.",
    source="test_tags_function",
)
def test_product_is_recomputed(part, device):
    """One product in forward; its recomputation and two gradients in backward."""

    def fn(x, y):
        return part.checkpoint(_product, torch.sin(x), y, use_reentrant=True)

    assert products(fn, square(device), square(device)) == (1, 3)


@requirement(
    "SP-002",
    "`checkpoint` MUST be traced the same if it is reached through a variable of an enclosing "
    "scope.",
    source="test_tags_function_via_global_checkpoint",
)
def test_checkpoint_is_found_through_a_global(part, device):
    """A checkpoint function in a variable of the enclosing scope is traced the same."""
    held = part.checkpoint

    def fn(x, y):
        return held(_product, torch.sin(x), y, use_reentrant=True)

    assert products(fn, square(device), square(device)) == (1, 3)


@requirement(
    "SP-003",
    "Options of `checkpoint`, such as `preserve_rng_state`, MUST NOT reach the checkpointed "
    "function.",
    source="test_tags_function_with_kwargs",
)
def test_options_of_checkpoint_do_not_reach_the_function(part, device):
    """`preserve_rng_state` is an option of checkpoint and does not reach the function."""

    def fn(x, y):
        return part.checkpoint(
            _product, torch.sin(x), y, use_reentrant=True, preserve_rng_state=False
        )

    assert products(fn, square(device), square(device)) == (1, 3)


@requirement(
    "SP-004",
    "Two regions of three products in sequence MUST both be recomputed: 6 products in forward, 18"
    " in backward.",
    source="test_tags_sequential_layers",
)
def test_two_regions_in_sequence(part, device):
    """Two regions of three products each: 6 in forward, 6 recomputed and 12 for gradients."""

    def body(x):
        x = x.cos()
        for _ in range(3):
            x = torch.mm(x, x)
        return x.cos()

    def fn(x):
        x = part.checkpoint(body, x, use_reentrant=False)
        return part.checkpoint(body, x, use_reentrant=False)

    assert products(fn, square(device)) == (6, 18)


@requirement(
    "SP-005",
    "Two regions with other work between them MUST both be recomputed.",
    source="test_tags_multiple_checkpoints",
)
def test_two_regions_with_work_between(part, device):
    """Regions separated by other work are each recomputed."""

    def fn(x, y):
        x = torch.sin(x)
        z = part.checkpoint(_product, x, y, use_reentrant=True)
        x = torch.sin(z)
        return part.checkpoint(_product, x, y, use_reentrant=True)

    assert products(fn, square(device), square(device)) == (2, 6)


class _Linear(nn.Module):
    def __init__(self, after) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.after = after

    def forward(self, x):
        return self.after(self.linear(x))


@requirement(
    "SP-006",
    "A module MUST be accepted as a region, and its activation MUST be recomputed in backward.",
    source="test_tags_module",
)
def test_module_is_a_region(part, device):
    """A module is checkpointed like a function; its activation is recomputed."""
    module = _Linear(torch.sigmoid).to(device)

    def fn(x):
        return part.checkpoint(module, torch.sin(x), use_reentrant=True)

    graphs = run_compiled(fn, square(device, size=10))
    assert count(graphs.forward, aten.sigmoid.default) == 1
    assert count(graphs.backward, aten.sigmoid.default) == 1


@requirement(
    "SP-007",
    "Operators from a decomposition MUST be recomputed if the original operator is.",
    source="test_tags_decomps",
)
def test_tags_survive_decomposition(part, device):
    """Operators from a decomposition are recomputed if the original operator is."""
    module = _Linear(lambda h: torch.sigmoid(nn.functional.gelu(h))).to(device)

    def gelu(x, approximate="none"):
        return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))

    def fn(x):
        return part.checkpoint(module, torch.sin(x), use_reentrant=True)

    graphs = run_compiled(fn, square(device, size=10), decompositions={aten.gelu.default: gelu})
    assert count(graphs.forward, aten.erf.default) == 1
    assert count(graphs.backward, aten.erf.default) == 1


@requirement(
    "SP-008",
    "A random operator inside a region MUST give the same numbers in recomputation.",
    source="test_tags_recomputed_rand",
)
@pytest.mark.parametrize("compiles", [False, True])
def test_random_operator_is_recomputed_with_the_same_numbers(part, device, compiles):
    """Gradients use the masks that the outputs show; compiled code may draw other masks."""

    def body(x):
        return x.sin() * (torch.rand_like(x) > 0.5)

    def fn(x):
        first = part.checkpoint(body, x, use_reentrant=False)
        return first, part.checkpoint(body, first.cos(), use_reentrant=False)

    run = compile_kept(fn)[0] if compiles else fn
    x = square(device, size=8)
    first, second = run(x)
    found = torch.autograd.grad((first.cos() + second).sum(), x)
    masked = x.sin() * (first != 0)
    again = masked.cos() + masked.cos().sin() * (second != 0)
    torch.testing.assert_close(found, torch.autograd.grad(again.sum(), x))


@requirement(
    "SP-009",
    "A compiled region of deterministic operators MUST give eager's values and gradients.",
    source="test_tags_rand",
)
def test_deterministic_region_after_random_setup(part, device):
    """A region of two products gives eager's values and gradients."""

    def body(x, y):
        return torch.mm(torch.mm(x, y), y)

    def fn(x, y):
        return torch.sin(part.checkpoint(body, torch.sin(x), y, use_reentrant=True))

    run_compiled(fn, square(device), square(device))


@requirement(
    "SP-010",
    "A module that ends in dropout MUST compile and differentiate as a region.",
    source="test_tags_dropout",
)
def test_dropout_is_compiled(part, device):
    """A region that ends in dropout compiles and differentiates."""
    module = _Linear(nn.Dropout(0.2)).to(device)

    def fn(x):
        return part.checkpoint(module, x, use_reentrant=True)

    run_compiled(fn, square(device, size=10), check=False)


@torch.compiler.disable
def _opaque(x):
    return x


@requirement(
    "SP-011",
    "A region with a graph break MUST run eagerly while the code around it is compiled.",
    source="test_fallback",
)
def test_graph_break_in_a_region_leaves_it_eager(part, device):
    """With a graph break inside, the region runs eagerly and the code around it compiled."""

    def body(x, y):
        return torch.cos(_opaque(torch.sigmoid(torch.matmul(_opaque(x), y))))

    def fn(x, y):
        return torch.cos(part.checkpoint(body, torch.sin(x), y, use_reentrant=False))

    graphs = run_compiled(fn, square(device), square(device), fullgraph=False)
    assert len(graphs.traced) >= 2


def _region_nodes(graph):
    return [node for node in graph.graph.nodes if "checkpoint" in str(node.target)]


@requirement(
    "SP-012",
    "Keyword arguments of the function MUST be inputs of the compiled region, in one graph.",
    source="test_kwargs",
)
def test_keyword_arguments_reach_the_function(part, device):
    """Keyword arguments that are not options of checkpoint are inputs of the region."""

    def body(x, y, z=None):
        a = torch.matmul(x, y)
        return a if z is None else torch.matmul(a, z)

    def fn(x, y, z):
        return torch.cos(part.checkpoint(body, x, y, use_reentrant=False, z=z))

    graphs = run_compiled(fn, square(device), square(device), square(device))
    (region,) = _region_nodes(graphs.traced[0])
    calls = list(graphs.traced[0].get_submodule(region.args[0].target).graph.nodes)
    assert len(graphs.traced) == 1
    assert len(region.args) == 1 + 3
    assert sum("call" in node.op for node in calls) == 2


@requirement(
    "SP-013",
    "A second input shape MUST compile once more and give a result of the right shape.",
    source="test_symints_location",
)
def test_symbolic_shapes_are_inputs_of_the_region(part, device):
    """A second shape compiles again, with the size as an input, and gives the right shape."""
    torch.compiler.reset()

    def body(x, y):
        return torch.matmul(x, torch.nn.functional.dropout(y, 0.5))

    def fn(x, y):
        return part.checkpoint(body, x, y, use_reentrant=True)

    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(fn, backend=backend)
    for size in (4, 5):
        out = compiled(square(device, size=size), square(device, size=size))
        assert out.shape == (size, size)
    assert len(seen) == 2
    assert len(_region_nodes(seen[0])[0].args) == 1 + 2


@requirement(
    "SP-024",
    "A graph break in a region under fullgraph MUST raise an Unsupported error that names the "
    "graph break.",
    source="test_error_msg",
)
def test_graph_break_under_fullgraph_is_named(part, device):
    """fullgraph=True refuses a region with a graph break, and the message says so."""

    def body(x):
        return torch.cos(_opaque(torch.sin(x)))

    def fn(x):
        return part.checkpoint(body, x, use_reentrant=True)

    with pytest.raises(Exception, match=r"(?is)compiler\.disable.*graph.break") as caught:
        torch.compile(fn, backend="eager", fullgraph=True)(square(device))
    assert type(caught.value).__name__ == "Unsupported"


@requirement(
    "SP-025",
    "A list of tensors MUST be accepted as an input and inside an output of a region.",
    source="test_list_inputs",
)
def test_list_inputs(part, device):
    """A list of tensors is an input, and a tuple with a list is an output."""

    def body(x, ys):
        return torch.sin(x), [torch.cos(ys[0]), torch.cos(ys[1])]

    def fn(x, ys):
        return part.checkpoint(body, x, ys, use_reentrant=True)

    x, y, z = (torch.randn(4, 4, device=device) for _ in range(3))
    compiled = torch.compile(fn, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, [y, z]), fn(x, [y, z]))


@requirement(
    "SP-026",
    "Recomputing a region MUST NOT run operators from before the region.",
    source="test_pattern_matcher",
)
def test_tag_is_passed_on_by_replacement(part, device):
    """Values from before the region are saved for backward and not recomputed."""

    def attention(query, key, value):
        scores = torch.matmul(query, key.transpose(-2, -1)).mul(1.0 / math.sqrt(key.shape[-1]))
        return scores.softmax(dim=-1).matmul(value)

    def fn(query, key, value):
        return part.checkpoint(attention, query.sin(), key, value, use_reentrant=True)

    args = [torch.randn(2, 2, 4, 8, device=device, requires_grad=True) for _ in range(3)]
    graphs = run_compiled(fn, *args)
    assert count(graphs.backward, aten.sin.default) == 0
    assert count(graphs.backward, aten._softmax.default) == 1


@requirement(
    "SP-023",
    "Attention in a region under autocast MUST give the same results compiled and eager.",
    source="test_autocast_flash_attention",
)
def test_attention_under_autocast(part, device):
    """Attention under autocast gives the same results compiled and eager."""

    def body(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def fn(*args):
        return part.checkpoint(body, *args, use_reentrant=True)

    args = [torch.randn(4, 2, 16, 32, device=device, requires_grad=True) for _ in range(3)]
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = fn(*args)
        torch.testing.assert_close(torch.compile(fn, backend="aot_eager")(*args), expected)
