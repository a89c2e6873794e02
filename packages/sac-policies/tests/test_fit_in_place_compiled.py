"""`fit_` on models with compiled blocks, and on compiled models."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import nn

from sac_policies import BudgetError, fit_
from sac_policies._torch_compat._module_calls import graph_breaks, original
from sac_policies.budget import Infeasible, InPlaceFit
from sac_policies.budget._checkpointed import Tagged, is_checkpointed
from sac_policies.budget._levels import COSTLY, KEEPS, LEVELS, RECOMPUTES
from sac_policies.budget._repeating import repeating
from sac_policies.policies._rules import RECOMPUTE_ALL

from ._blocks import Block, stack
from ._fitted import BATCH, ROWS, own_forwards, training

# The compiler reads `.grad` of a block's inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_compiler"),
]

STEPS = 2
"""That `training` runs."""
ONCE_MORE_UNDER_A_MODE = torch.__version__.startswith("2.9.")
"""Torch 2.9 compiles again for the step of each fit_ in which operators are noted."""


class Counting:
    """A backend that runs graphs eagerly under autograd and counts graphs and runs."""

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


def _compile(model: Any, how: str, backend: Any) -> None:
    for number, block in enumerate(list(model.blocks)):
        if how == "in place":
            block.compile(backend=backend)
        else:
            model.blocks[number] = torch.compile(block, backend=backend)


def kept_bytes(forward: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd saves."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(seen.values())


WRAPPED = pytest.param("wrapped", marks=pytest.mark.nightly)


@pytest.mark.parametrize("how", ["in place", WRAPPED])
def test_compiled_blocks_take_three_levels(how: str) -> None:
    """Predictions hold, gradients are unchanged, and all blocks on a level share one graph."""
    model, backend = stack(), Counting()
    _compile(model, how, backend)
    expected = training(model)
    graphs, breaks, found = backend.graphs, graph_breaks(), set()
    smallest = fit_(model, BATCH, 1000)
    assert isinstance(smallest, Infeasible)
    for budget in ("75%", smallest.smallest_bytes):  # the smallest has both other levels
        fitted = fit_(model, BATCH, budget)
        assert isinstance(fitted, InPlaceFit)
        assert fitted.peak_bytes <= fitted.budget_bytes
        assert abs(fitted.predicted_bytes - fitted.peak_bytes) <= 0.02 * fitted.peak_bytes
        before = backend.runs
        assert all(map(torch.equal, training(model), expected))
        assert backend.runs - before == STEPS * len(fitted.regions)
        found |= {each.level for each in fitted.regions}
        fitted.undo()
        before = backend.runs
        assert all(map(torch.equal, training(model), expected))
        assert backend.runs - before == STEPS * len(fitted.regions)
    assert found == set(LEVELS[: RECOMPUTES + 1])
    assert graph_breaks() == breaks
    watched = 3 * len(model.blocks) if ONCE_MORE_UNDER_A_MODE else 0
    assert backend.graphs - graphs <= 2 + watched


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_ten_tagged_blocks_share_their_graphs(how: str) -> None:
    """They save half of the bytes: inputs and matmuls. Undoing restores the first graph."""
    model, backend = stack(10), Counting()
    _compile(model, how, backend)
    expected, plain = training(model), kept_bytes(lambda: model(ROWS))
    graphs, breaks = backend.graphs, graph_breaks()
    blocks = list(model.blocks)
    before = [dict(vars(original(block))) for block in blocks]
    tagged = [Tagged(block, policy=COSTLY) for block in blocks]
    for each in tagged:
        each.put()
    assert all(map(is_checkpointed, blocks))
    assert all(map(torch.equal, training(model), expected))
    assert kept_bytes(lambda: model(ROWS)) < 0.55 * plain
    assert (backend.graphs - graphs, graph_breaks() - breaks) == (1, 0)
    for each in tagged:
        each.undo()
    assert [dict(vars(original(block))) for block in blocks] == before
    assert not any(map(is_checkpointed, blocks))
    assert kept_bytes(lambda: model(ROWS)) == plain
    assert backend.graphs - graphs == 1


def test_undone_tags_inside_a_wrapper_keep_everything() -> None:
    """A forward that wraps them since then remains, and calls the block's original forward."""
    model = stack()
    _compile(model, "in place", "aot_eager")
    expected, plain = training(model), kept_bytes(lambda: model(ROWS))
    tagged = [Tagged(block, policy=COSTLY) for block in model.blocks]
    for each in tagged:
        each.put()
        each.module.forward = functools.partial(each.module.forward)  # type: ignore[method-assign]
    assert kept_bytes(lambda: model(ROWS)) < plain
    for each in tagged:
        each.undo()
    assert own_forwards(model) == [f"blocks.{number}" for number in range(4)]
    assert kept_bytes(lambda: model(ROWS)) == plain
    assert all(map(torch.equal, training(model), expected))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_tagged_blocks_is_checkpointed(copied: Callable[[nn.Module], Any]) -> None:
    """Copies of compiled modules are not compiled; their regions run eagerly with their weights."""
    model = stack()
    _compile(model, "in place", "aot_eager")
    for block in model.blocks:
        Tagged(block, policy=COSTLY).put()
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    plain = stack()
    assert kept_bytes(lambda: twin(ROWS)) < kept_bytes(lambda: plain(ROWS))
    assert all(map(torch.equal, training(twin), training(plain)))


class Remembering(Block):
    """A block that compiles in one graph, except inside a checkpoint."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the block and keep the input."""
        self.last = x.detach()
        return super().forward(x, mask=mask)


@pytest.mark.parametrize("fullgraph", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_blocks_that_take_no_tags_keep_everything(fullgraph: bool) -> None:
    """The compiler breaks their graph or raises."""
    model = stack()
    for block in model.blocks:
        block.__class__ = Remembering
        block.compile(backend="aot_eager", fullgraph=fullgraph)
    assert_keeps_everything(model)


def assert_keeps_everything(model: nn.Module) -> None:
    """No level checkpoints; gradients are unchanged."""
    expected = training(model)
    found = fit_(model, BATCH, "50%")
    assert isinstance(found, Infeasible)
    assert f"4 x {LEVELS[KEEPS]}" in found.how
    assert all(map(torch.equal, training(model), expected))


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_patched_forwards_keep_everything(how: str) -> None:
    """They take no tags."""
    model = stack()
    for block in model.blocks:
        block.forward = functools.partial(block.forward)  # type: ignore[method-assign]
    _compile(model, how, "aot_eager")
    assert_keeps_everything(model)


class Scaled(nn.Module):
    """Divides by a buffer that it writes to, and reads it in different ways; x is (rows, 24)."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(24, 96), nn.Linear(96, 24), way
        self.register_buffer("scale", torch.ones(96))
        self.norm = nn.BatchNorm1d(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write before or after the buffer is read, through a view, or in a norm."""
        y = self.up(x)
        if self.way == "norm":
            return self.down(self.norm(y).sin())
        size = y.detach().abs().mean(0)
        if self.way == "before":
            self.scale.mul_(0.9).add_(size, alpha=0.1)
            y = y / self.scale
        elif self.way == "branch":
            self.scale.add_(1)
            y = torch.where(self.scale[0] > 2, y.sin(), y.cos())
        else:
            view = self.scale.view(1, 96) if self.way == "view" else self.scale
            y = (y + view).sin()
            view.mul_(0.9)
        return self.down(y.exp().tanh())


REST = ("before", "branch", "after", "norm")
"""Ways that are tested at night; the contract has the first of them."""


@pytest.mark.parametrize(
    "policy",
    [pytest.param(COSTLY, marks=pytest.mark.nightly), RECOMPUTE_ALL],
    ids=["matmuls", "nothing"],
)
@pytest.mark.parametrize(
    "way",
    ["view", *(pytest.param(each, marks=pytest.mark.nightly) for each in REST)],
)
def test_tags_keep_what_reads_a_written_buffer(way: str, policy: Any) -> None:
    """Gradients and buffers of three steps are those of the eager model."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Scaled(way) for _ in range(2)))
    model, found = copy.deepcopy(plain), []
    for block in model:
        block.compile(backend="aot_eager")
        Tagged(block, policy=policy).put()
    for each in (plain, model):
        steps = []
        for step in range(3):
            each.zero_grad()
            each(ROWS.repeat(1, 3) + step).square().sum().backward()
            steps += [p.grad for p in each.parameters() if p.grad is not None]
            steps += [b.clone() for b in each.buffers()]
        found.append(steps)
    assert all(map(torch.equal, *found))
    x = ROWS.repeat(1, 3)
    plain[0].compile(backend="aot_eager")
    assert kept_bytes(lambda: model[0](x)) < kept_bytes(lambda: plain[0](x))


def test_a_block_alone_may_be_compiled() -> None:
    """The other blocks keep all their levels; a compiled block may be the whole model."""
    assert fit_(torch.compile(Block(), backend="aot_eager"), ROWS.repeat(1, 3), 1.0)
    model = stack()
    model.blocks[1].compile(backend="aot_eager")
    expected = training(model)
    found = fit_(model, BATCH, "55%")
    assert isinstance(found, InPlaceFit)
    levels = {each.path: each.level for each in found.regions}
    assert levels["blocks.1"] in LEVELS[: RECOMPUTES + 1]
    assert all(map(torch.equal, training(model), expected))


def test_blocks_are_told_apart_by_what_they_were() -> None:
    """All compiled wrappers share one class, so blocks are compared by the wrapped class."""
    model = stack()
    first, last = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    model.blocks.append(torch.compile(first, backend="eager"))
    model.blocks.append(torch.compile(last, backend="eager"))
    count = len(model.blocks) - 2
    assert [path for path, _ in repeating(model)] == [f"blocks.{n}" for n in range(count)]


def test_what_is_compiled_as_a_whole_is_refused() -> None:
    """The error says what is compiled and gives both remedies; no region fits inside a graph."""
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


@pytest.mark.nightly
def test_what_is_compiled_after_fit_follows_it() -> None:
    """It compiles in one graph, in which tags replace the regions."""
    model = stack()
    expected = training(model)
    found = fit_(model, BATCH, "60%")
    assert isinstance(found, InPlaceFit)
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(training(model), expected)
    found.undo()
    torch.testing.assert_close(training(model), expected)
