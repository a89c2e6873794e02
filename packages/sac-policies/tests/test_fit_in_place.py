"""Blocks are checkpointed in place until a measured step fits a budget."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from sac_policies import BudgetError, MutationError, fit_
from sac_policies.budget import Infeasible, InPlaceFit, _fit_in_place
from sac_policies.budget._intervals import Steps
from sac_policies.budget._levels import RECOMPUTES
from sac_policies.budget._step import Step

from ._blocks import Block, Stack, stack
from ._fitted import BATCH, ROWS, TARGET, own_forwards, peak_growth, training

CPU = torch.device("cpu")
LEVELS = RECOMPUTES + 1
"""Those of the CPU."""
MOST_STEPS, MOST_CONFIRMED = 8, 2


@pytest.mark.parametrize(
    "budget", [0.6, *(pytest.param(each, marks=pytest.mark.nightly) for each in ("85%", "45%"))]
)
def test_a_step_fits_and_gradients_are_the_plain_ones(budget: Any) -> None:
    """The peak is measured independently; also with other batches, a mask, a loss and autocast."""
    model, plain = stack(), stack()
    found = fit_(model, BATCH, budget)
    assert isinstance(found, InPlaceFit)
    share = budget if isinstance(budget, float) else float(budget[:-1]) / 100
    assert found.budget_bytes == pytest.approx(share * found.plain_bytes, abs=1)
    assert found.peak_bytes <= found.budget_bytes
    fewer = {"x": ROWS[:100], "target": TARGET[:100]}
    for given in (fewer, {"target": TARGET}, {"mask": ROWS[:, :1] > 0}, {}):
        assert all(map(torch.equal, training(model, **given), training(plain, **given)))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, training(model), training(plain)))

    def step(one: nn.Module) -> Callable[[], None]:
        one.zero_grad()
        torch.manual_seed(0)
        return lambda: one(**BATCH)["loss"].backward()

    grown, before = (peak_growth(step(one), device=CPU) for one in (model, plain))
    assert before - grown >= (found.plain_bytes - found.peak_bytes) * 0.95
    found.undo()
    assert all(map(torch.equal, training(model), training(plain)))


def _attending() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(24, 2, 48) for _ in range(3)))


class _Residual(nn.Module):
    """A block of a ResNet; x is (images, channels, rows, columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(6), nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.two(self.second(torch.relu(self.one(self.first(x))))))


class _Shared(nn.Module):
    """One block that runs four times, as in ALBERT; x is (256, 24)."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.block(x)
        return x


class _ByName(_Shared):
    """Calls the layers of a block through another method, past hooks, as SqueezeBERT does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.block.forward(x)
        return x


def test_blocks_are_found_where_their_forward_is_called_by_its_name() -> None:
    """They keep fewer bytes, with the same gradients."""
    model, batch = nn.Sequential(_ByName()), ROWS[:256].repeat(1, 3)

    def gradients() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        return torch.autograd.grad(model(batch).square().sum(), list(model.parameters()))

    expected = gradients()
    found = fit_(model, batch, "80%")
    assert isinstance(found, InPlaceFit)
    assert [region.path for region in found.regions] == ["0.block"]
    assert all(map(torch.equal, gradients(), expected))
    found.undo()


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "stack": lambda: (stack(), BATCH),
    "deep": lambda: (stack(12), BATCH),
    "attention": lambda: (_attending(), torch.ones(32, 8, 24)),
    "images": lambda: (nn.Sequential(*(_Residual() for _ in range(3))), torch.ones(4, 6, 9, 9)),
    "shared": lambda: (nn.Sequential(_Shared()), ROWS[:256].repeat(1, 3)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each != "shared")) for each in MODELS],
)
def test_at_most_eight_steps_are_run(name: str) -> None:
    """For any blocks, whether it fits or not; two steps confirm a prediction."""
    model, batch = MODELS[name]()
    forwards: list[object] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(None))
    for budget in ("75%", 1):
        forwards.clear()
        found = fit_(model, batch, budget)
        assert len(forwards) <= MOST_STEPS
        if isinstance(found, InPlaceFit):
            assert LEVELS <= len(found.rounds) <= LEVELS + MOST_CONFIRMED
            found.undo()


def test_everything_fits_and_nothing_is_checkpointed() -> None:
    """The budget equals the peak of a plain step; few steps are run."""
    model = stack()
    found = fit_(model, BATCH, 1.0)
    assert isinstance(found, InPlaceFit)
    assert own_forwards(model) == []
    assert found.rounds == ((0, found.plain_bytes),)
    assert "4 x keeps everything: blocks.0 to blocks.3 (Block)" in str(found)


def alike(search: _fit_in_place._Search, intervals: Any) -> Steps:
    """Steps whose times depend only on the level."""
    del search
    begun = {(n, 0, True) for n in range(4)}
    timed = [
        [replace(each, ns=10_000 * level * (each.key in begun)) for each in own]
        for level, own in enumerate(intervals)
    ]
    return Steps([Block] * 4, timed)


def test_less_budget_keeps_less_in_the_first_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step per level and one more; the report lists the levels."""
    monkeypatch.setattr(_fit_in_place._Search, "_steps", alike)
    levels = list(_fit_in_place.LEVELS)
    sums = []
    for budget in ("90%", "60%", "45%"):
        found = fit_(stack(), BATCH, budget)
        assert isinstance(found, InPlaceFit)
        done = [levels.index(region.level) for region in found.regions]
        assert [region.path for region in found.regions] == [f"blocks.{i}" for i in range(4)]
        assert done == sorted(done, reverse=True)
        assert len(found.rounds) == LEVELS + 1
        assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.02)
        sums.append(sum(done))
        assert f"of {found.plain_bytes / 1024**2:.2f} MiB without checkpointing" in str(found)
        assert all(
            (region.policy is None) == (region.level == "keeps everything")
            for region in found.regions
        )
    assert sums == sorted(sums)


def test_a_model_without_blocks_is_one_region() -> None:
    """The region's path is empty, and the report calls it the model."""
    model = Block()
    found = fit_(model, torch.ones(1024, 24), 1.0)
    assert isinstance(found, InPlaceFit)
    assert [region.path for region in found.regions] == [""]
    assert "the model" in str(found)


class Around(Stack):
    """Runs its blocks without calling them."""

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        """Give scores."""
        x = self.first(x)
        for block in self.blocks:
            x = Block.forward(block, x)  # type: ignore[arg-type]
        return {"scores": self.head(x)}


def test_infeasible_names_the_cause() -> None:
    """A model without blocks is one block; blocks that nobody calls save nothing."""
    one = fit_(nn.Linear(8, 8), ROWS, "60%")
    assert "Linear has no modules that repeat and have parts" in str(one)
    model = Around()
    around = fit_(model, ROWS, "50%")
    assert isinstance(around, Infeasible)
    assert around.smallest_bytes // 2 == around.budget_bytes
    assert own_forwards(model) == []
    assert around.cause == "None of the 4 blocks was called as a module or by its forward"
    assert f"more. {around.cause}. Raise" in str(around)
    assert fit_(stack(), BATCH, 1).cause == ""


def test_each_measured_step_is_a_line_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its number, what blocks do, its peak and seconds; not if quiet."""
    fit_(stack(), BATCH, "60%")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fit_(stack(), BATCH, "60%", quiet=True)
    assert capsys.readouterr().err == ""
    found = fit_(stack(), BATCH, "60%")
    out, told = capsys.readouterr()
    assert out == ""
    lines = told.splitlines()
    assert all(re.fullmatch(r"fit_: step \d, .*, \d+\.\d s", line) for line in lines)
    assert lines[0].startswith("fit_: step 1, which finds blocks, ")
    size = f"{found.plain_bytes / 1024**2:.2f} MiB"
    assert any(f"each block keeps everything, {size}, " in line for line in lines)
    assert f", {found.peak_bytes / 1024**2:.2f} MiB, " in lines[-1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fit_(len, ROWS, "50%"), "model <built-in function len> is a"),  # type: ignore[arg-type]
        (lambda: fit_(stack(), ROWS, "half"), "size 'half' does not parse"),
        (lambda: fit_(stack(), ROWS, 1.5), "budget 1.5 is a fraction, but"),
        (lambda: fit_(stack(), ROWS, 60.0), 'Write "60%" for percent'),
        (lambda: fit_(stack(), ROWS, 60), 'Write "60%" for a share of the plain step'),
        (lambda: fit_(stack(), [ROWS], "60%"), "a list, which is passed to it as one argument"),
        (lambda: fit_(stack(), DataLoader([1]), "50%"), "Pass next(iter(loader))"),  # type: ignore[arg-type]
        (lambda: fit_(stack(), ROWS, "50%", loss=3), "loss 3 is a int"),  # type: ignore[arg-type]
        (
            lambda: fit_(stack().requires_grad_(False), ROWS, "50%"),
            "the model's output has no tensor that needs a gradient",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], said: str) -> None:
    """Refused by name, before or in the first step."""
    with pytest.raises(BudgetError) as caught:
        call()
    assert said in str(caught.value)


def test_a_model_that_was_fitted_is_refused() -> None:
    """The error names the module and a remedy; then the model can be fitted again."""
    model = stack()
    found = fit_(model, BATCH, "50%")
    assert isinstance(found, InPlaceFit)
    with pytest.raises(BudgetError, match=r"module 'blocks\.0' is checkpointed by an earlier fit_"):
        fit_(model, BATCH, "50%")
    found.undo()
    assert fit_(model, BATCH, "50%")


QUIET = """
import torch
from torch import nn
from sac_policies import fit_
layer = lambda: nn.TransformerEncoderLayer(8, 2)
assert fit_(nn.Sequential(layer(), layer()), torch.ones(64, 32, 8), "90%")
"""


@pytest.mark.nightly
def test_nothing_is_printed() -> None:
    """Neither the package nor the profiler prints."""
    env = {word: value for word, value in os.environ.items() if word != "KINETO_LOG_LEVEL"}
    command = [sys.executable, "-c", QUIET]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert (done.stdout, done.stderr) == ("", "")


class _Stage(nn.Module):
    """Blocks in a list, behind a layer; x is (n, 24)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_below_stages_are_found_where_stages_do_not_fit() -> None:
    """Stages if they fit, else the blocks below them, which give the smallest peak."""
    model, batch = nn.Sequential(_Stage(3), _Stage(3)), torch.ones(1024, 24)
    none = fit_(model, batch, 1)
    assert isinstance(none, Infeasible)
    stages = fit_(model, batch, "95%")
    assert isinstance(stages, InPlaceFit)
    assert [region.path for region in stages.regions] == ["0", "1"]
    assert "(_Stage)" in str(stages)
    stages.undo()
    blocks = fit_(model, batch, none.smallest_bytes)
    assert isinstance(blocks, InPlaceFit)
    paths = [f"{stage}.blocks.{at}" for stage in range(2) for at in range(3)]
    assert [region.path for region in blocks.regions] == paths
    assert ".blocks.2 (Block)" in str(blocks)
    assert blocks.peak_bytes <= none.smallest_bytes


class Towers(nn.Module):
    """Two stacks: a step runs one or both; x is (rows, 24)."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList(Block() for _ in range(4)) for _ in range(2))
        self.runs = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.runs:
            for block in self.towers[number]:
                x = block(x)
        return x


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_blocks_that_did_not_run_keep_no_more(share: float) -> None:
    """A step with the other tower stays in the budget; a step with both gives a warning."""
    torch.manual_seed(0)
    model, x = Towers(), torch.randn(512, 24)
    found = fit_(model, x, share)
    assert found
    assert [region.path for region in found.idle] == [f"towers.1.{n}" for n in range(4)]
    assert "so a step that runs more blocks may take more: 4 x" in str(found)
    model.runs = [1]
    step = Step(model, x, None)
    with step.trials():
        for _ in range(2):
            step.run()
        assert step.peak() <= found.budget_bytes
    found.undo()
    assert not own_forwards(model)


@pytest.mark.parametrize("make", [lambda: stack(4), Towers])
def test_smallest_number_can_be_reached(make: Callable[[], nn.Module]) -> None:
    """The smallest number fits exactly, and nothing below it."""
    torch.manual_seed(0)
    model = make()
    batch: Any = torch.randn(512, 24) if isinstance(model, Towers) else BATCH
    none = fit_(model, batch, 1000)
    assert isinstance(none, Infeasible)
    found = fit_(model, batch, none.smallest_bytes)
    assert found
    assert found.peak_bytes <= none.smallest_bytes
    found.undo()
    assert not fit_(model, batch, none.smallest_bytes - 4096)


class Graph(nn.Module):
    """Layers between neighbour sums, whose matrix is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("neighbours", torch.eye(256).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the rows after each layer."""
        for layer in self.layers:
            x = torch.tanh(torch.sparse.mm(self.neighbours, layer(x)))
        return x


def test_sparse_buffer_is_no_obstacle() -> None:
    """It counts as resident and is unchanged."""
    changed = fit_(Graph(), torch.randn(256, 32), 1.0)
    assert changed
    changed.undo()


class _Added(Block):
    """Reads its input through an operator that must run again."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the block to twice the input."""
        return super().forward(x * 2)


class _InPlace(nn.Module):
    """Adds each block's result to the block's input in place; x is (rows, 24)."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Added(norm=norm) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        x = x * 1
        for block in self.blocks:
            x += block(x)
        return x


def test_level_that_reads_a_changed_input_is_left_out() -> None:
    """If no other level checkpoints, the error says what changed."""
    with pytest.raises(MutationError, match=r"tensor of shape \[128, 24\] .*changed in place"):
        fit_(_InPlace(nn.LayerNorm), torch.randn(128, 24), "50%")
    assert fit_(_InPlace(nn.LayerNorm), torch.randn(128, 24), 1.0)
