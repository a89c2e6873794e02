"""A recorded step predicts its memory, and its memory under other plans."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from sac_policies import BudgetError, checkpoint, profile_step, recompute_all, solve
from sac_policies.budget import BudgetPlan, StepTrace
from sac_policies.budget._solve import spread
from sac_policies.budget._step import Step

from .test_fit import RandomGraph


class Tied(nn.Module):
    """A tied embedding whose two gradients are summed; x is (rows, length)."""

    def __init__(self, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        for layer in self.layers:
            y = layer(y)
        return F.cross_entropy((y @ self.table.weight.t()).flatten(0, 1), x.flatten())


def text(rows: int = 16) -> torch.Tensor:
    """A batch of token ids."""
    return torch.arange(rows * 32).view(rows, 32) % 64


def measured(model: nn.Module, batch: Any, plan: BudgetPlan | None = None) -> int:
    """Peak of the third step, from the allocator."""
    step = Step("here", model, batch, None)
    call: Any = model
    if plan is not None:
        call = partial(checkpoint, model, policy=plan)
    with step.leaving_the_model():
        for _ in range(2):
            step.run(call)
        return step.peak(call)


@pytest.mark.parametrize("share", [None, 1.0, 0.7, 0.4, 0.1, 0.0])
def test_peak_is_predicted(share: float | None) -> None:
    """Dropout, tied weights and a loss in the model; exact to the byte on torch 2.13."""
    torch.manual_seed(0)
    model, batch = Tied(), text()
    step = profile_step(model, batch, unit="flops")
    plan = None
    if share is not None:
        low, high = step.trace.fixed_bytes(), step.trace.total_bytes()
        plan = solve(step.trace, low + int(share * (high - low)))
        assert isinstance(plan, BudgetPlan)
    assert step.peak_bytes(plan) == pytest.approx(measured(model, batch, plan), rel=0.01)


def test_sum_of_gradients_of_a_tied_table_is_predicted() -> None:
    """The first gradient is a view, to which autograd does not add in place."""
    torch.manual_seed(0)
    model, batch = Tied(layers=1), text(1)[:, :4]
    model.table.weight = nn.Parameter(torch.randn(4096, 32))
    step = profile_step(model, batch, unit="flops")
    assert step.peak_bytes() == pytest.approx(measured(model, batch), rel=0.001)


@pytest.mark.parametrize("seed", range(40))
def test_peaks_of_random_graphs_are_predicted(seed: int) -> None:
    """Plain, and under plans that keep fewer values: nine of ten are exact to the byte."""
    model = RandomGraph(seed)
    x = torch.randn(model.rows, model.width, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    step = profile_step(model, x, unit="flops")
    plans = [solve(step.trace, step.trace.total_bytes() * n // 4) for n in range(5)]
    found = [None, *(plan for plan in plans if plan), *(spread(step.trace, n) for n in (2, 3))]
    for plan in found:
        assert plan is None or isinstance(plan, BudgetPlan)
        taken = measured(model, x, plan)
        assert step.peak_bytes(plan) == pytest.approx(taken, rel=0.01), plan


class Written(nn.Module):
    """Writes to saved tensors, draws masks, uses indices and casts; x is (rows, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        z = y + 1
        y.mul_(0.5).relu_()
        z = F.dropout(z.sin() * y, 0.2)
        best, places = z.topk(16, dim=-1)
        with torch.autocast("cpu", torch.bfloat16):
            out = self.down(z + z.gather(1, places).sum(-1, keepdim=True))
        return (out.float().exp().clamp(max=2.0) * best.mean(-1, keepdim=True)).sum()


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.0])
def test_copies_masks_and_places_are_predicted(share: float) -> None:
    """Writes, random numbers and integer results make the tape hold copies."""
    torch.manual_seed(0)
    model, x = Written(), torch.randn(512, 64)
    step = profile_step(model, x, unit="flops")
    low, high = step.trace.fixed_bytes(), step.trace.total_bytes()
    plan = solve(step.trace, low + int(share * (high - low)))
    assert isinstance(plan, BudgetPlan)
    assert step.peak_bytes(plan) == pytest.approx(measured(model, x, plan), rel=0.01)


def test_prediction_is_what_peaks_are_compared_by() -> None:
    """Of many plans, the one with the smallest prediction has the smallest peak, within 2 %."""
    torch.manual_seed(0)
    model, batch = Tied(), text()
    step = profile_step(model, batch)
    plans = [spread(step.trace, n) for n in (1, 2, 4, 8, 16)]
    taken = [measured(model, batch, plan) for plan in plans]
    assert max(taken) > 1.2 * min(taken)
    best = min(range(len(plans)), key=lambda at: step.peak_bytes(plans[at]))
    assert taken[best] <= 1.02 * min(taken)


def without_temporaries(step: StepTrace) -> StepTrace:
    """The step without temporary memory of its operators."""
    run, made = step._run, set()
    calls = []
    for call in run.calls:
        read = {run.layouts[number].storage for number in call.inputs}
        out = {run.layouts[each.number].storage for each in tree_leaves(call.out) if each}
        calls.append(replace(call, most_bytes=sum(run.sizes[n] for n in out - read - made)))
        made |= out
    return replace(step, _run=replace(run, calls=calls))


def test_fake_tensors_predict_what_real_ones_do() -> None:
    """To the byte, except for temporary memory inside operators."""
    real = profile_step(Tied(dropout=0.0), text())
    with FakeTensorMode() as mode:
        fake = profile_step(Tied(dropout=0.0), mode.from_tensor(text()))
    assert fake.trace.unit == "flops"
    bare = without_temporaries(real)
    for share in ("100%", "60%", "30%"):
        plan = solve(fake.trace, share)
        assert isinstance(plan, BudgetPlan)
        assert fake.peak_bytes(plan) == bare.peak_bytes(plan)


def test_meta_tensors_tell_what_fake_ones_do() -> None:
    """Only for kernels that both devices have: attention on meta is another operator."""

    def told(dry: AbstractContextManager[Any]) -> StepTrace:
        with dry:
            model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 8))
            return profile_step(model, torch.ones(512, 64))

    fake, meta = told(FakeTensorMode()), told(torch.device("meta"))
    assert meta.trace == fake.trace
    for share in ("100%", "60%", "30%"):
        plan = solve(meta.trace, share)
        assert isinstance(plan, BudgetPlan)
        assert meta.peak_bytes(plan) == fake.peak_bytes(plan)


class Penalized(nn.Module):
    """A loss with a slope that is computed in forward; x is (rows, 32)."""

    def __init__(self, depth: int, create_graph: bool) -> None:
        super().__init__()
        self.create_graph = create_graph
        self.layers = nn.ModuleList(nn.Linear(32 if n == 0 else 64, 64) for n in range(depth))
        self.down = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = x.detach().requires_grad_()
        for layer in self.layers:
            y = torch.tanh(layer(y))
        y = self.down(y).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=self.create_graph, retain_graph=True)
        return y + slope.square().sum()


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("share", [None, 1.0, 0.5, 0.0])
def test_forward_that_takes_gradients_is_predicted(share: float | None, create_graph: bool) -> None:
    """Tensors that it reads again are freed between the reads."""
    torch.manual_seed(0)
    model, x = Penalized(4, create_graph), torch.randn(512, 32)
    step = profile_step(model, x, unit="flops")
    plan = None
    if share is not None:
        low, high = step.trace.fixed_bytes(), step.trace.total_bytes()
        plan = solve(step.trace, low + int(share * (high - low)))
        assert isinstance(plan, BudgetPlan)
    assert step.peak_bytes(plan) == pytest.approx(measured(model, x, plan), rel=0.001)


FIRST = """
from sac_policies import profile_step
from tests.test_step_trace import Penalized, measured, torch
model, x = Penalized(1, True), torch.randn(512, 32)
print(profile_step(model, x, unit="flops").peak_bytes(), measured(model, x))
"""


def test_first_step_of_a_process_is_predicted() -> None:
    """Modules that torch imports under the first mode hold no tensors of the forward."""
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", FIRST],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    predicted, taken = done.stdout.split()
    assert predicted == taken


def test_another_loss_counts() -> None:
    """A loss that expands the model's output."""
    model, x = nn.Linear(8, 8), torch.randn(64, 8)
    wide = profile_step(model, x, loss=lambda y: y.repeat(1, 50).exp().sum())
    assert wide.peak_bytes() > profile_step(model, x).peak_bytes() + 64 * 8 * 4 * 50


def test_step_without_a_model_raises() -> None:
    """The message says that a model is needed."""
    with pytest.raises(BudgetError, match=r"profile_step: model .* Pass an nn\.Module"):
        profile_step(torch.sin, torch.ones(3))  # type: ignore[arg-type]


def test_forwards_that_differ_raise() -> None:
    """A prediction needs the same operators in every forward."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x).sin() if self.calls > 2 else super().forward(x)

    with pytest.raises(BudgetError, match=r"profile_step: forwards ran 2 and 3"):
        profile_step(Counting(4, 4), torch.ones(2, 4))


@pytest.mark.parametrize("wrong", [recompute_all(), 3, "50%"])
def test_what_is_no_plan_of_the_engine(wrong: Any) -> None:
    """The message says which functions return plans."""
    step = profile_step(nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(BudgetError, match=r"peak_bytes: plan .* Pass what solve\(step\.trace"):
        step.peak_bytes(wrong)


def test_plan_of_another_step() -> None:
    """The message names the operator that this step does not call."""
    one, other = (
        profile_step(nn.Sequential(*(nn.Tanh(),) * n, nn.Linear(4, 4)), leaf()) for n in (1, 3)
    )
    plan = solve(other.trace, "100%")
    with pytest.raises(BudgetError, match=r"lists aten.* but this step has no such call"):
        one.peak_bytes(plan)  # type: ignore[arg-type]


def leaf() -> torch.Tensor:
    """An input that requires grad."""
    return torch.ones(2, 4, requires_grad=True)
