"""Compiled code in a region, and random numbers in a compiled region."""

import pytest
import torch
import torch.nn.functional as F

from torchparts_conformance import requirement


@requirement(
    "SP-163",
    "Compiled code inside a region MUST run as its compiled graph, in forward and in "
    "recomputation, with the gradients without checkpointing.",
    rationale=(
        "pytorch/pytorch#161889: selective checkpointing silently ran a compiled function "
        "uncompiled"
    ),
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's
@pytest.mark.parametrize("keeps", [False, True])
def test_compiled_code_in_a_region_runs_compiled(part, keeps):
    """In forward and in recomputation: one graph, never run eagerly."""
    torch.compiler.reset()
    graphs, calls = [], []

    def backend(graph, _):
        graphs.append(graph)

        def run(*args):
            calls.append(1)
            return graph.forward(*args)

        return run

    inner = torch.compile(lambda t: (t.sin() * t).cos(), backend=backend)
    x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    policy = [torch.ops.aten.mm.default] if keeps else []
    expected = torch.autograd.grad(((x @ x).sin() * (x @ x)).cos().sum(), x)[0]
    for step in range(1, 4):
        out = part.checkpoint(lambda t: inner(t @ t), x, policy=policy)
        assert len(calls) >= step
        found = torch.autograd.grad(out.sum(), x)[0]
        assert torch.allclose(found, expected)
    assert len({len(graph.graph.nodes) for graph in graphs}) == 1


@requirement(
    "SP-164",
    "In a compiled region with any policy, backward MUST use the random numbers of forward, and "
    "the generator MUST end in the same state as in compiled code without the region.",
    rationale=(
        "pytorch/pytorch#190758: a memory budget with dropout corrupted random state under the "
        "compiler"
    ),
)
@pytest.mark.parametrize("policy", [[], [torch.ops.aten.mm.default]], ids=["nothing", "products"])
def test_compiled_region_uses_one_dropout_mask(part, policy):
    """Dropout in a compiled region: one mask; the generator as without the region."""

    def function(t):
        hidden = torch.sin(t @ t)
        dropped = F.dropout(hidden, 0.5)
        return dropped.cos(), dropped, hidden

    x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    left = []
    for compiles in (lambda t: function(t), lambda t: part.checkpoint(function, t, policy=policy)):
        torch.compiler.reset()
        region = torch.compile(compiles, backend="aot_eager_decomp_partition")
        for step in range(2):
            torch.manual_seed(step)
            out, dropped, hidden = region(x)
            mask = torch.where(hidden != 0, dropped / hidden, 0.0).round().detach()
            found = torch.autograd.grad(out.sum(), x)[0]
            left.append(torch.rand(1).item())
            again = (torch.sin(x @ x) * mask).cos().sum()
            assert torch.allclose(found, torch.autograd.grad(again, x)[0], atol=1e-5)
    assert left[:2] == left[2:]
