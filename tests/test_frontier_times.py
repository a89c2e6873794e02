"""Times of models by way: rounds that turn, ways that stay applied, runs that are joined."""

from __future__ import annotations

import argparse
import gc
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import sac_policies

ROOT = Path(__file__).parent.parent
# A policy for all models names operators that a small one does not run.
pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


class Block(nn.Module):
    """A product and what is cheap to make again; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.forwards = nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return x + torch.tanh(self.inner(x)) * x.sigmoid()


class Stack(nn.Sequential):
    """Two blocks, called by name."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """How steps are clocked."""
    monkeypatch.syspath_prepend(str(ROOT / "packages/sac-policies/benchmarks"))
    import frontier_times

    return frontier_times


@pytest.fixture
def bench(clocks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """How models are measured."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/integration"))
    import frontier_models

    return frontier_models


@pytest.fixture
def case(bench: ModuleType) -> Any:
    """A model like those of others."""
    from _models import Case

    batch = {"x": torch.linspace(-1, 1, 64 * 16).view(64, 16)}
    return Case("stack", "torch", Stack, lambda: batch, ("Block",))


def test_rounds_turn_and_last_as_long_as_they_are_given(
    clocks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second one goes backwards; there are more of them while there is time."""
    order: list[int] = []
    steps = [lambda at=at: order.append(at) or 1.0 for at in range(3)]
    assert clocks.in_turn(steps, 2) == [[1.0, 1.0]] * 3
    assert order == [0, 1, 2, 2, 1, 0]
    ticks = itertools.count()
    monkeypatch.setattr(clocks.time, "monotonic", lambda: next(ticks))
    assert len(clocks.in_turn(steps, 1, seconds=5)[0]) == 5


def test_a_machine_that_gets_slower_does_not_decide(clocks: ModuleType) -> None:
    """A step is held against the first way's in the same round."""
    assert clocks.over_the_first([[1.0, 10.0, 2.0], [2.0, 20.0, 4.0]]) == [1.0, 2.0]


def test_no_garbage_is_collected_in_a_step(clocks: ModuleType) -> None:
    """It would be that of the way before; it is switched on again."""
    seen: list[bool] = []
    assert clocks.seconds_of(lambda: seen.append(gc.isenabled())) >= 0.0
    assert seen == [False]
    assert gc.isenabled()


def test_each_way_has_a_model_that_keeps_to_it(bench: ModuleType, case: Any) -> None:
    """Seen by how often a block's forward runs in one step; too small a budget has no model."""
    runs = {}
    for way, model in bench.changed(case, ["100%", "1%"]):
        if model is None:
            runs[way] = None
            continue
        bench.gradients(case, model)
        before = model[1].forwards
        bench.gradients(case, model)
        runs[way] = model[1].forwards - before
    again = {"full": 2, "selective": 2}
    once = dict.fromkeys(("none", "nothing", "products", "fit_ 100%", "solve 50%"), 1)
    assert runs == {**again, **once, "fit_ 1%": None}


def test_plan_of_a_block_keeps_half_of_its_bytes(
    bench: ModuleType, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block has one of its own; where one has none, nothing is changed."""
    model = bench.made(case)
    assert bench.solved(case, model, "50%")
    plans = [block.forward.keywords["policy"] for block in list(model)[1:]]
    assert all(0 < plan.kept_bytes <= 2 * 64 * 16 * 4 for plan in plans)
    too_little = sac_policies.Infeasible(budget_bytes=1, smallest_bytes=2)
    monkeypatch.setattr(sac_policies, "solve", lambda *_: too_little)
    plain = bench.made(case)
    assert not bench.solved(case, plain, "50%")
    assert "forward" not in vars(plain[1])
    assert dict(bench.changed(case, []))["solve 50%"] is None


def test_times_are_of_every_way_with_the_gradients_of_a_plain_model(
    bench: ModuleType, case: Any
) -> None:
    """Over the plain model's own; a way that raises says so, and what has none is None."""
    options = argparse.Namespace(budgets=["100%", "1%"], rounds=2, seconds=0)
    told = bench.times_of(case, options)
    ways = {"none", "full", "nothing", "selective", "products", "fit_ 100%", "solve 50%"}
    assert told["bitwise"] == dict.fromkeys(ways, True)
    assert told["times"].keys() == {*ways, "fit_ 1%"}
    assert told["times"]["none"] == 1.0 and told["times"]["fit_ 1%"] is None
    assert all(told["times"][way] > 0 for way in ways)
    assert told["rounds"] == 2


def test_way_that_raises_is_left_out_of_the_rounds(
    bench: ModuleType, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first line of what it says."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("no\nmore")

    monkeypatch.setattr(bench, "REGIONS", {"none": None, "full": refuse})
    options = argparse.Namespace(budgets=[], rounds=1, seconds=0)
    told = bench.times_of(case, options)
    assert told["full raises"] == "no"
    assert told["times"]["full"] is None and told["times"]["none"] == 1.0


def test_way_with_other_gradients_is_seen(
    bench: ModuleType, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time would be that of something else."""
    regions = {"none": None, "full": lambda forward, x: 2 * forward(x)}
    monkeypatch.setattr(bench, "REGIONS", regions)
    told = bench.times_of(case, argparse.Namespace(budgets=[], rounds=1, seconds=0))
    assert told["bitwise"] == {"none": True, "full": False, "solve 50%": True}


def test_runs_are_joined_to_ranges(bench: ModuleType) -> None:
    """Bytes are of the first; gradients are the same if they are in every run."""

    def run(ms: float, full: float, fit: float | None, same: bool) -> list[dict[str, Any]]:
        times = {"none": 1.0, "full": full, "fit": fit}
        return [{"plain ms": ms, "rounds": 3, "times": times, "bitwise": {"full": same}}]

    first = run(4.0, 1.5, 1.2, True)
    first[0]["bytes"] = {"none": 8}
    (row,) = bench.joined([first, run(3.0, 1.4, None, False)])
    assert row["times"] == {"none": [1.0, 1.0], "full": [1.4, 1.5], "fit": None}
    assert (row["plain ms"], row["rounds"], row["bytes"]) == ([3.0, 4.0], 6, {"none": 8})
    assert row["bitwise"] == {"full": False}
