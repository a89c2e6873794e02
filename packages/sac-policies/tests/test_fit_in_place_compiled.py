"""A model of which torch.compile has compiled blocks, or all: fitted in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import nn

from sac_policies import BudgetError, fit_
from sac_policies.budget import InPlaceFit
from sac_policies.budget._repeating import repeating

from ._blocks import stack
from ._fitted import BATCH, training

# The compiler looks for gradients of the values that a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

STEPS = 2
"""That `training` runs."""
ONCE_MORE_UNDER_A_MODE = torch.__version__.startswith("2.9.")
"""The step in which operators are noted: torch 2.9 guards on modes that pass compiled code by."""


class Counting:
    """A backend that runs what it is given under autograd, and counts graphs and their runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs += 1

        def forward(traced: torch.fx.GraphModule, _: Any) -> Any:
            def run(*args: Any) -> Any:
                self.runs += 1
                return traced(*args)

            return make_boxed_func(run)

        def backward(traced: torch.fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(traced.forward)

        return aot_function(graph, fw_compiler=forward, bw_compiler=backward)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compile(model: Any, how: str, backend: Any) -> None:
    for number, block in enumerate(list(model.blocks)):
        if how == "in place":
            block.compile(backend=backend)
        else:
            model.blocks[number] = torch.compile(block, backend=backend)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_blocks_run_again_as_they_were_compiled(how: str) -> None:
    """Kernels are kept, nothing is compiled anew, and gradients are those of compiled blocks."""
    model, backend = stack(), Counting()
    _compile(model, how, backend)
    expected = training(model)
    graphs = backend.graphs
    found = fit_(model, BATCH, "70%")
    assert isinstance(found, InPlaceFit)
    assert {each.level for each in found.regions} == {"keeps everything", "runs again"}
    assert found.peak_bytes <= found.budget_bytes
    assert abs(found.predicted_bytes - found.peak_bytes) <= 0.02 * found.peak_bytes
    before = backend.runs
    assert all(map(torch.equal, training(model), expected))
    again = sum(each.level == "runs again" for each in found.regions)
    assert backend.runs - before == STEPS * (len(found.regions) + again)
    found.undo()
    before = backend.runs
    assert all(map(torch.equal, training(model), expected))
    assert backend.runs - before == STEPS * len(found.regions)
    assert backend.graphs - graphs <= (len(found.regions) if ONCE_MORE_UNDER_A_MODE else 0)


def test_undo_leaves_what_was_compiled() -> None:
    """And a second budget can be tried then."""
    model = stack()
    _compile(model, "in place", "eager")
    before = [dict(vars(block)) for block in model.blocks]
    for budget in ("70%", "60%"):
        found = fit_(model, BATCH, budget)
        assert isinstance(found, InPlaceFit)
        with pytest.raises(BudgetError, match="is checkpointed by an earlier fit_"):
            fit_(model, BATCH, budget)
        found.undo()
    assert [dict(vars(block)) for block in model.blocks] == before


def test_a_block_alone_may_be_compiled() -> None:
    """The others keep all their levels."""
    model = stack()
    model.blocks[1].compile(backend="aot_eager")
    expected = training(model)
    found = fit_(model, BATCH, "55%")
    assert isinstance(found, InPlaceFit)
    levels = {each.path: each.level for each in found.regions}
    assert levels["blocks.1"] in ("keeps everything", "runs again")
    assert all(map(torch.equal, training(model), expected))


def test_blocks_are_told_apart_by_what_they_were() -> None:
    """All that is wrapped has one class; it is no block for that, nor one of several kinds."""
    model = stack()
    first, last = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    model.blocks.append(torch.compile(first, backend="eager"))
    model.blocks.append(torch.compile(last, backend="eager"))
    count = len(model.blocks) - 2
    assert [path for path, _ in repeating(model)] == [f"blocks.{n}" for n in range(count)]


def test_what_is_compiled_as_a_whole_is_refused() -> None:
    """With what it is, and both ways out; a region cannot be in the middle of a graph."""
    outside = nn.ModuleDict({"inner": stack()})
    outside["inner"].compile(backend="eager")
    wanted = (
        "sac_policies.fit_: module 'inner' (Stack) is compiled as a whole, but blocks are "
        "checkpointed one by one, where Python calls them. Compile it after fit_, or compile each "
        "of its blocks instead: block.compile()."
    )
    with pytest.raises(BudgetError, match=f"^{re.escape(wanted)}$"):
        fit_(outside, BATCH, "70%")
    for model in (torch.compile(stack(), backend="eager"), stack()):
        model.compile(backend="eager")
        with pytest.raises(BudgetError, match=r"the model \(Stack\) is compiled as a whole"):
            fit_(model, BATCH, "70%")


def test_what_is_compiled_after_fit_follows_it() -> None:
    """In one graph, the regions in which are tags."""
    model = stack()
    expected = training(model)
    found = fit_(model, BATCH, "60%")
    assert isinstance(found, InPlaceFit)
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(training(model), expected)
    found.undo()
    torch.testing.assert_close(training(model), expected)
