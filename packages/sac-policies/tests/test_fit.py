"""The measured peak of a fitted step is always within the budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sac_policies import checkpoint, fit_, plan_region
from sac_policies.budget import Fit, Infeasible, StepTrace, Trace, _step_trace
from sac_policies.budget._measure import storage_bytes
from sac_policies.budget._profile import trace_of

from ._fitted import peak_growth

CPU = torch.device("cpu")


Values = tuple[torch.Tensor, torch.Tensor]
KINDS = ("mm", "addmm", "gated", "norm", "silu", "gelu", "mul", "add", "exp", "softmax", "view")


class RandomGraph(nn.Module):
    """A few layers drawn from matmuls, norms and functions; each reads the last two values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        r = random.Random(seed)
        self.width, self.rows = r.choice([8, 24, 40]), r.choice([64, 200, 500])
        self.weights = nn.ParameterList()
        self.steps = [self.step(r) for _ in range(r.randrange(5, 14))]

    def step(self, r: random.Random) -> Callable[[Values], torch.Tensor]:
        """Draw one layer."""
        kind = r.choice(KINDS)
        weight = nn.Parameter(torch.randn(self.width, self.width, generator=_seeded(r)) / 6)
        if kind in ("mm", "addmm", "gated"):
            self.weights.append(weight)
        table: dict[str, Callable[[Values], torch.Tensor]] = {
            "mm": lambda v: v[1] @ weight,
            "addmm": lambda v: F.linear(v[1], weight, weight[0]),
            "gated": lambda v: F.silu(v[1] @ weight) * (v[0] @ weight.t()),
            "norm": lambda v: F.layer_norm(v[1], (self.width,)),
            "silu": lambda v: F.silu(v[1]),
            "gelu": lambda v: F.gelu(v[1]),
            "mul": lambda v: v[0].sin() * v[1],
            "add": lambda v: v[0] + v[1],
            "exp": lambda v: v[1].clamp(max=1).exp(),
            "softmax": lambda v: v[1].softmax(-1),
            "view": lambda v: v[1].view(2, -1).t().reshape(-1, self.width),
        }
        return table[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = (x, x)
        for step in self.steps:
            values = (values[1], step(values))
        return values[0].mean() + values[1].mean()


def _seeded(r: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(r.randrange(10**6))


def measured_peak(model: nn.Module, x: torch.Tensor, found: Fit | None) -> int:
    """Peak of one more step: resident and allocated bytes."""
    for parameter in model.parameters():
        parameter.grad = None

    def step() -> None:
        if found is None:
            model(x).backward()
        else:
            checkpoint(model, x, policy=found.policy).backward()

    return storage_bytes([*model.parameters(), x], device=CPU) + peak_growth(step, device=CPU)


def check_graph(seed: int) -> str:
    """Fit one random graph to a random budget and measure its peak independently."""
    model = RandomGraph(seed)
    x = torch.randn(model.rows, model.width, generator=_seeded(random.Random(seed)))
    x.requires_grad_()
    share = random.Random(seed + 1).uniform(0.6, 1.0)
    found = plan_region(model, x, share, loss=lambda out: out)
    if isinstance(found, Infeasible):
        assert found.budget_bytes < found.smallest_bytes
        return "infeasible"
    peak = measured_peak(model, x, found)
    assert peak == found.peak_bytes <= found.budget_bytes, (seed, found)
    plain = torch.autograd.grad(model(x), x)[0]
    assert torch.equal(plain, torch.autograd.grad(checkpoint(model, x, policy=found.policy), x)[0])
    return "whole" if found.policy.recompute_cost == 0 else "partial"


@pytest.mark.parametrize(
    ("seeds", "partial"),
    [
        (range(20), 5),
        pytest.param(range(20, 80), 15, marks=[pytest.mark.nightly, pytest.mark.slow]),
    ],
)
def test_peak_is_within_budget_on_random_graphs(seeds: range, partial: int) -> None:
    """The independently measured peak equals the reported one and is within the budget."""
    assert [check_graph(seed) for seed in seeds].count("partial") >= partial


class Stack(nn.Module):
    """Gated layers whose activations outweigh their parameters, with state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = F.dropout(self.norm(x), 0.1)
        for layer in self.layers:
            gate, value = layer(x).chunk(2, dim=-1)
            x = F.silu(gate) * value
        return x * scale


BATCH = torch.ones(8, 32)


@pytest.fixture
def stack() -> Stack:
    """The stack, from one seed."""
    torch.manual_seed(0)
    return Stack()


def test_tighter_budgets_repeat_more(stack: Stack) -> None:
    """With a falling budget, peaks stay within it and recomputed work rises."""
    x = torch.randn(1024, 32)
    shares = (1.0, 0.9, 0.8)
    measured = [plan_region(stack, x, share) for share in shares]
    # Times of separate profiles cannot be compared; FLOPs and bytes can.
    counted = [plan_region(stack, x, share, unit="flops") for share in shares]
    assert all(each and each.peak_bytes <= each.budget_bytes for each in measured + counted)
    assert measured[0].policy.recompute_cost == 0
    costs = [each.policy.recompute_cost for each in counted if each]
    assert costs[0] == 0 < costs[1] <= costs[2]


@pytest.mark.parametrize("seed", range(4))
def test_budget_is_feasible_whatever_times_were_measured(stack: Stack, seed: int, monkeypatch):
    """Feasibility depends only on bytes; times only affect which values are kept."""
    r = random.Random(seed)

    def traced(*args: object, **kwargs: object) -> Trace:
        trace = trace_of(*args, **kwargs)
        costs = [r.choice((1, r.randrange(10**6))) for _ in trace.ops]
        pairs = zip(trace.ops, costs, strict=True)
        return replace(trace, ops=tuple(replace(op, cost=cost) for op, cost in pairs))

    monkeypatch.setattr(_step_trace, "trace_of", traced)
    x = torch.randn(1024, 32)
    found = plan_region(stack, x, 0.7)
    assert found
    assert found.peak_bytes <= found.budget_bytes
    assert found.policy.bound_cost <= found.policy.recompute_cost


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_two_steps_confirm_a_prediction(stack: Stack, share: float) -> None:
    """One step without checkpointing, for relative budgets, and one or two under plans."""
    found = plan_region(stack, torch.randn(1024, 32), share)
    assert found
    assert len(found.rounds) <= 3
    assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.01)


@pytest.mark.parametrize(("factor", "fits"), [(0.97, True), (1.03, True), (0.1, False)])
def test_predictions_that_are_off_are_corrected(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, factor: float, fits: bool
) -> None:
    """A plan above its prediction lowers the target; a plan over budget is never returned."""
    predicted = StepTrace.peak_bytes
    monkeypatch.setattr(
        StepTrace, "peak_bytes", lambda step, plan=None: int(factor * predicted(step, plan))
    )
    found = plan_region(stack, torch.randn(1024, 32), 0.8)
    assert bool(found) is fits
    if found:
        assert found.peak_bytes <= found.budget_bytes
    else:
        assert found.smallest_bytes > found.budget_bytes


class Graph(nn.Module):
    """Layers between neighbour sums, whose matrix is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("neighbours", torch.eye(256).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.sparse.mm(self.neighbours, layer(x)))
        return x


def test_sparse_buffer_is_no_obstacle() -> None:
    """It counts as resident and is unchanged, in place and as one region."""
    model, x = Graph(), torch.randn(256, 32)
    found = plan_region(model, x, 1.0)
    assert found
    assert found.peak_bytes <= found.budget_bytes
    assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    changed = fit_(model, x, 1.0)
    assert changed
    changed.undo()


def test_infeasible_says_the_smallest_peak(stack: Stack) -> None:
    """The reported size fits; one byte less does not."""
    x = torch.randn(1024, 32)
    found = plan_region(stack, x, "1 KiB", unit="flops")
    assert isinstance(found, Infeasible)
    assert not found
    assert found.budget_bytes == 1024
    assert "% of what it takes without checkpointing, as one region; see fit_" in str(found)
    again = plan_region(stack, x, found.smallest_bytes, unit="flops")
    assert again
    assert again.peak_bytes == found.smallest_bytes
    assert not plan_region(stack, x, found.smallest_bytes - 1, unit="flops")
