"""Nodes of compiled code are tagged with the decisions of eager code."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from functorch.compile import (
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import (
    ATTENTION,
    MATMULS,
    checkpoint,
    checkpoint_name,
    context_fn,
    first_match,
    offload,
    recompute_all,
    recompute_ops,
    report,
    save_all,
    save_by_bytes,
    save_by_flops,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    scoped,
)
from sac_policies.compiled._tags import tags
from sac_policies.policies import Decision, as_policy, save_by_index

POLICIES = {
    "save_ops": save_ops(MATMULS, ATTENTION),
    "recompute_ops": first_match(recompute_ops("aten.mm"), save_ops("aten.*mm")),
    "save_all": save_all(),
    "recompute_all": recompute_all(),
    "save_every_nth": save_every_nth(MATMULS, n=2, phase=1),
    "save_named": save_named("hidden"),
    "save_modules": save_modules("up", "n?"),
    "scoped": scoped(save_ops(MATMULS), "down"),
    "save_by_bytes": save_by_bytes(at_least=600, at_most=2000),
    "save_by_flops": save_by_flops(at_least=5000),
    "save_by_index": save_by_index({("aten.mm.default", 1): Decision.SAVE}),
    "union": save_ops("aten.mm") | save_by_bytes(at_least=1000),
    "intersection": save_ops(MATMULS) & save_by_bytes(at_least=1000),
    "complement": ~save_ops(MATMULS),
    "all but a name": ~save_named("hidden"),
    "names but one": save_named("*", missing_ok=True) & ~save_named("hidden"),
    "a name or an operator": save_named("hidden") | save_ops("aten.mm"),
}


BY_DAY = {"save_ops", "save_named", "save_modules", "save_by_bytes", "recompute_all"}
"""One policy of each kind of fact that a rule reads; the others are tested at night."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _keep(graph, inputs):
    return make_boxed_func(graph.forward)


def _compiled(function, bw_compiler=_keep, partition=min_cut_rematerialization_partition):
    """Compile, with another compiler of backward graphs or another partitioner."""

    def backend(graph, inputs):
        return aot_module_simplified(
            graph, inputs, fw_compiler=_keep, bw_compiler=bw_compiler, partition_fn=partition
        )

    return torch.compile(function, backend=backend, fullgraph=True)


def _counted(function):
    """Compile; return the compiled function, and the backward matmuls of each compilation."""
    products = []

    def note(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default]
        products.append(nodes)
        return _keep(graph, inputs)

    return _compiled(function, bw_compiler=note), products


def _with_name(block):
    up = block.up.forward
    block.up.forward = lambda x: checkpoint_name(up(x), "hidden")
    return block


def _tagged(function, *args):
    """Compile; return (operator, number, decision) of every tagged node."""
    found = []

    def partition(joint, *rest, **kwargs):
        numbers = Counter()
        for node in joint.graph.nodes:
            tag = node.meta.get("recompute")
            op = str(node.target)
            # Parts of one output are separate nodes; detach is added by checkpointing.
            if tag is None or "getitem" in op or op == "aten.detach.default":
                continue
            saves = tag.name.endswith("SAVE")
            found.append((op, numbers[op], Decision.SAVE if saves else Decision.RECOMPUTE))
            numbers[op] += 1
        return min_cut_rematerialization_partition(joint, *rest, **kwargs)

    _compiled(function, partition=partition)(*args).sum().backward()
    return tuple(found)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, id=name, marks=[pytest.mark.nightly] * (name not in BY_DAY))
        for name, policy in POLICIES.items()
    ],
)
def test_tags_are_eagers_decisions(policy, make_block, x):
    """A policy decides equally for eager and compiled code."""
    block = _with_name(make_block())
    rows = report(block, x, policy=policy).rows
    compiled = _tagged(lambda t: checkpoint(block, t, policy=policy), x)
    assert compiled == tuple((row.op, row.index, row.decision) for row in rows)


class _Products:
    """A callable policy object with another callable method."""

    def __call__(self, ctx, op, *args, **kwargs):
        return op is torch.ops.aten.mm.default

    method = __call__


@pytest.mark.parametrize("policy", [_Products(), _Products().method], ids=["object", "method"])
@pytest.mark.parametrize(
    "given",
    [
        "as_policy",
        "context_fn",
        pytest.param(
            "policy",
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.9."),
                reason="torch 2.9 takes no such object for a constant",
            ),
        ),
    ],
)
def test_callable_objects_are_policies_under_compile(policy, given):
    """The compiler receives a partial of a module-level function for every policy."""
    policy = as_policy(policy) if given == "as_policy" else policy
    x, fn = torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_(), context_fn(policy)

    def body(t):
        return (t @ t).sin()

    def run(t):
        if given != "context_fn":
            return checkpoint(body, t, policy=policy)
        return torch_checkpoint(body, t, use_reentrant=False, context_fn=fn)

    assert ("aten.mm.default", 0, Decision.SAVE) in _tagged(run, x)
    (got,) = torch.autograd.grad(torch.compile(run, backend="aot_eager")(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(body(x).sum(), x)[0])


def test_offload_is_refused_under_compile(make_block, x):
    """Compiled code cannot offload values; the error names the operator."""
    block, policy = make_block(), offload("aten.mm")

    def run(t):
        return checkpoint(block, t, policy=policy)

    with pytest.raises(Exception, match=r"policy offloads operator aten\.mm\.default .*; policy "):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("way", ["policy", "context_fn"])
def test_another_policy_compiles_again(way):
    """Two policies with one function compile separately; the first one's code is reused."""
    x = torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()

    def body(t):
        return (t @ t).sin()

    def run(t, made):
        if way == "policy":
            return checkpoint(body, t, policy=made)
        return torch_checkpoint(body, t, use_reentrant=False, context_fn=made)

    compiled, graphs = _counted(run)
    made = [save_ops("aten.mm"), recompute_all()]
    made = made if way == "policy" else list(map(context_fn, made))
    for each in (*made, *made):
        compiled(x, each).sum().backward()
    assert [len(graph) for graph in graphs] == [2, 3]


def test_learning_of_the_outputs_keeps_nothing(make_block, x, recwarn):
    """AOTAutograd's first run of a region is not counted: one warning lists unmatched names."""
    block, policy = make_block(), save_ops("aten.mm") | save_ops("aten.bmm")

    def run(t):
        return checkpoint(block, t, policy=policy)

    torch.compile(run, backend="aot_eager", fullgraph=True)(x).sum().backward()
    said = [str(each.message) for each in recwarn if "match nothing" in str(each.message)]
    assert len(said) == 1
    assert "entries 'aten.bmm' match nothing" in said[0]


def test_function_of_a_base_class_compiles_in_one_graph():
    """Compiled code cannot evaluate `callable(super().forward)`."""

    policy = save_ops("aten.addmm")

    class Region(torch.nn.Linear):
        def forward(self, t):
            return checkpoint(super().forward, t, policy=policy)

    region = Region(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    out = torch.compile(region, backend="aot_eager", fullgraph=True)(x)
    found = torch.autograd.grad(out.sin().sum(), [*region.parameters(), x])
    plain = torch.nn.functional.linear(x, region.weight, region.bias)
    assert all(
        map(torch.equal, found, torch.autograd.grad(plain.sin().sum(), [*region.parameters(), x]))
    )


def test_what_was_traced_is_handed_back_and_not_traced_again(x):
    """Operators are replayed in order; a call beyond the trace runs normally."""
    first, again = tags(save_all())
    with torch.no_grad():
        with first:
            made = [x @ x.mT, x @ x.mT, x.exp()]
        with again:
            back = [x @ x.mT, x @ x.mT, x.exp()]
            more = x.exp()
    assert [each.data_ptr() for each in back] == [each.data_ptr() for each in made]
    assert len({each.data_ptr() for each in (*made, more)}) == 4
    assert torch.equal(more, made[-1])


def test_compiled_region_has_gradients_of_eager_code(make_block, x, gradients):
    """With every second matmul saved."""
    block, policy = make_block(), POLICIES["save_every_nth"]
    compiled = torch.compile(
        lambda t: checkpoint(block, t, policy=policy), backend="aot_eager_decomp_partition"
    )
    wanted = gradients(block, x, module=block)
    torch.testing.assert_close(gradients(compiled, x, module=block), wanted)
