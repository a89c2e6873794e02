"""Spans as places that policies name, in every engine; what is no region does not notice them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import (
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import (
    PolicyError,
    UnmatchedNameError,
    checkpoint,
    recompute_all,
    report,
    save_modules,
    save_ops,
    scoped,
    span,
)

from ._recipe import leaf


class Block(nn.Module):
    """A span around modules, another inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 16) in and out."""
        return span(self.feed, "ffn")(x).sin()

    def feed(self, x: Tensor) -> Tensor:
        """What the outer span runs."""
        return self.down(span(F.gelu, "act")(self.up(x)))


class _Ran(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def _run_again(policy: Any, engine: str) -> list[str]:
    """Which operators of `Block` run again in backward, under a policy that names spans."""
    torch.manual_seed(0)
    block, x = Block(), leaf(8, 16)
    wanted = torch.autograd.grad(block(x).sum(), x)
    for _ in range(2):  # the first forward of a function is watched
        out = checkpoint(block, x, policy=policy, engine=engine)
    with _Ran() as ran:
        found = torch.autograd.grad(out.sum(), x)
    assert torch.equal(*wanted, *found)
    return [op for op in ran.ops if op in ("aten.gelu.default", "aten.addmm.default")]


@pytest.mark.parametrize("engine", ["recipe", "contexts"])
def test_policies_keep_and_recompute_spans_by_name(engine: str) -> None:
    """The inner, the outer with the modules that it calls, one operator in it."""
    gelu, product = "aten.gelu.default", "aten.addmm.default"
    assert gelu in _run_again(recompute_all(), engine)
    assert _run_again(save_modules("act"), engine).count(gelu) == 0
    assert product in _run_again(save_modules("act"), engine)
    assert _run_again(save_modules("ffn"), engine) == []
    assert _run_again(save_modules("ffn.act"), engine).count(gelu) == 0
    assert product not in _run_again(scoped(save_ops("aten.addmm"), "ffn"), engine)
    assert gelu in _run_again(scoped(save_ops("aten.addmm"), "ffn"), engine)


def _saved_when_compiled(policy: Any) -> list[str]:
    """Which operators of `Block` the traced graph marks to be saved."""
    torch.compiler.reset()
    block, x, found = Block(), leaf(8, 16), []

    def partition(joint: Any, *args: Any, **kwargs: Any) -> Any:
        marked = [each for each in joint.graph.nodes if "SAVE" in str(each.meta.get("recompute"))]
        found.extend(str(node.target) for node in marked)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def kept(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backend(graph: Any, inputs: Any) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=kept, partition_fn=partition)

    compiled = torch.compile(lambda x: checkpoint(block, x, policy=policy), backend=backend)
    wanted = torch.autograd.grad(block(x).sum(), x)
    assert torch.allclose(*wanted, *torch.autograd.grad(compiled(x).sum(), x))
    return sorted(name for name in found if "gelu" in name or "addmm" in name)


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="the compiler of torch 2.9 is told of no spans"
)
def test_compiled_code_knows_spans_too() -> None:
    """Saved inside a span, by its name, in the traced graph."""
    gelu, product = "aten.gelu.default", "aten.addmm.default"
    assert _saved_when_compiled(save_modules("act")) == [gelu]
    assert _saved_when_compiled(save_modules("ffn")) == [product, product, gelu]
    assert _saved_when_compiled(scoped(save_ops("aten.addmm"), "ffn")) == [product, product]
    assert _saved_when_compiled(recompute_all()) == []


def test_a_span_outside_of_regions_is_a_plain_call() -> None:
    """Also of several values, by name, in torch's own checkpoint, and compiled."""
    x = leaf(4, 4)
    both = span(lambda t, *, scale: (t * scale, t.sin()), "both")
    one, other = both(x, scale=2.0)
    assert torch.equal(one, x * 2.0)
    assert torch.equal(other, x.sin())
    out = torch.utils.checkpoint.checkpoint(span(F.gelu, "act"), x, use_reentrant=False)
    assert torch.equal(out, F.gelu(x))
    compiled = torch.compile(lambda t: span(F.gelu, "act")(t), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), F.gelu(x))


def test_spans_stand_in_for_methods() -> None:
    """In a class, on one module, and in a copy or a pickle of it, where it runs that module."""

    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Marked(Act):
        forward = span(Act.forward, "act")

    x = leaf(4, 4)
    assert torch.equal(Marked()(x), x * 2)
    linear = nn.Linear(4, 4)
    linear.forward = span(linear.forward, "out")
    twin = copy.deepcopy(linear)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(twin(x), twin.bias.expand(4, 4))
    assert not torch.equal(linear(x), twin(x))
    again = pickle.loads(pickle.dumps(linear))
    assert torch.equal(again(x), linear(x))
    assert "span(" in repr(linear.forward)


def test_report_shows_the_place_of_a_span() -> None:
    """After the path of the module."""
    told = report(Block(), leaf(8, 16), policy=save_modules("act"))
    places = {row.op: row.module for row in told.rows}
    assert places["aten.gelu.default"] == " | ffn.act"
    assert places["aten.addmm.default"] == "down | ffn"


def test_a_span_that_no_region_has_is_an_error_by_its_name() -> None:
    """With those that there are."""
    out = checkpoint(Block(), leaf(8, 16), policy=save_modules("atc"))
    with pytest.raises(UnmatchedNameError, match="Did you mean 'act'"):
        out.sum().backward()


def test_what_is_no_function_or_label_is_refused() -> None:
    """With what is needed."""
    with pytest.raises(PolicyError) as error:
        span(3, "act")
    assert str(error.value) == (
        "sac_policies.span: function 3 is a int, but a span runs code. Pass a function or a "
        "module, and call what is returned."
    )
    with pytest.raises(PolicyError) as error:
        span(F.gelu, "")
    assert str(error.value) == (
        "sac_policies.span: label '' is a str that names nothing, but a policy finds a span by "
        "text. Write for example span(function, 'act')."
    )
