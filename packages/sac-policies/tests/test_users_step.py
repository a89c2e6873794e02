"""A step is what the user's function runs, with its own loss, accumulation and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from sac_policies import BudgetError, fit_
from sac_policies.budget import InPlaceFit

from ._blocks import Block, stack
from ._fitted import BATCH, ROWS, TARGET, peak_growth

CPU = torch.device("cpu")


def loss_and_backward(model: nn.Module, batch: Any) -> None:
    """What is measured without `step`."""
    model(**batch)["loss"].backward()


def accumulated(model: nn.Module, batch: Any) -> None:
    """Four parts of a batch, with a loss of the loop."""
    for x, target in zip(batch["x"].split(256), batch["target"].split(256), strict=True):
        scores = model(x)["scores"]
        (F.cross_entropy(scores.double(), target) / 4).backward()


def assert_as_measured(found: Any, run: Callable[[], object], state: list[torch.Tensor]) -> None:
    """A real step takes what was predicted, within 2 %."""
    assert isinstance(found, InPlaceFit)
    resident = sum(each.nbytes for each in state)
    taken = resident + peak_growth(run, device=CPU)
    assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    assert found.peak_bytes == pytest.approx(taken, rel=0.02)


@pytest.mark.parametrize(
    "budget", ["90%", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("70%", "60%"))]
)
def test_accumulation_fits_as_predicted(budget: str) -> None:
    """The parts keep their values one after the other, and gradients from the first part on."""
    model, plain = stack(), stack()
    found = fit_(model, BATCH, budget, step=accumulated)
    state = [*model.parameters(), *BATCH.values()]
    torch.manual_seed(0)
    assert_as_measured(found, lambda: accumulated(model, BATCH), state)
    levels = {region.level for region in found.regions}
    assert budget != "90%" or "keeps everything" in levels
    torch.manual_seed(0)
    accumulated(plain, BATCH)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Loop:
    """A trainer with counters, logs, a scheduler and optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count, self.logs = model, 0, {"loss": []}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Forward, backward with scaling, and a step."""
        self.count += 1
        loss = model(**batch)["loss"]
        self.logs["loss"].append(loss.item())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> Any:
        """All that a step changes, as plain values."""
        parts = (self.model, self.optimizer, self.scaler, self.scheduler)
        found = [self.count, self.logs, *(each.state_dict() for each in parts)]
        return tree_map_only(torch.Tensor, torch.Tensor.tolist, copy.deepcopy(found))


@pytest.mark.parametrize("bound", [True, False])
def test_step_of_a_trainer_leaves_it_as_it_was(bound: bool) -> None:
    """Counters, logs, schedulers and optimizers; later steps train as without `fit_`."""
    loop, plain = Loop(stack()), Loop(stack())
    before = loop.state()
    step = loop.training_step if bound else lambda model, batch: loop.training_step(model, batch)
    found = fit_(loop.model, BATCH, "70%", step=step)
    assert found
    assert loop.state() == before
    for each in (loop, plain):
        torch.manual_seed(0)
        for _ in range(2):
            each.training_step(each.model, BATCH)
    assert loop.state() == plain.state() != before


def test_state_of_optimizers_that_step_inside_counts() -> None:
    """As with `optimizer=`, before and after their first step."""
    loop = Loop(stack())
    found = fit_(loop.model, BATCH, 1.0, step=loop.training_step)
    given = fit_(stack(), BATCH, 1.0, optimizer=loop.optimizer)
    assert found.plain_bytes == pytest.approx(given.plain_bytes, abs=200)
    loop.training_step(loop.model, BATCH)
    again = fit_(loop.model, BATCH, 1.0, step=loop.training_step)
    assert again.plain_bytes == pytest.approx(found.plain_bytes, abs=200)


def generator_and_critic() -> nn.ModuleDict:
    """Two stacks of blocks."""
    torch.manual_seed(0)
    parts = {name: nn.Sequential(*(Block() for _ in range(3))) for name in ("made", "judged")}
    return nn.ModuleDict(parts)


def test_two_models_with_two_optimizers_fit() -> None:
    """A critic on real and made rows, then the generator through the critic."""
    models, rows = generator_and_critic(), ROWS.repeat(1, 3)
    ways = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in models.items()}

    def step(models: nn.ModuleDict, rows: torch.Tensor) -> None:
        made, judged = models["made"], models["judged"]
        fake = made(torch.rand_like(rows))
        (judged(fake.detach()).mean() - judged(rows).mean()).backward()
        ways["judged"].step()
        models.zero_grad()
        (-judged(fake).mean()).backward()
        ways["made"].step()
        models.zero_grad()

    before = copy.deepcopy(models.state_dict())
    for budget in ("80%", "60%"):
        found = fit_(models, rows, budget, step=step)
        assert isinstance(found, InPlaceFit)
        assert {region.path.partition(".")[0] for region in found.regions} == set(models)
        assert all(map(torch.equal, models.state_dict().values(), before.values()))
        trained = copy.deepcopy(models)
        torch.manual_seed(0)
        assert_as_measured(found, lambda: step(models, rows), [*models.parameters(), rows])
        models.load_state_dict(before)
        found.undo()
        del trained


def test_other_models_of_a_step_count() -> None:
    """Such as a reference model that a closure holds."""
    model, reference = stack(), stack(8).requires_grad_(False)

    def step(model: nn.Module, batch: Any) -> None:
        with torch.no_grad():
            wanted = reference(batch["x"])["scores"]
        F.mse_loss(model(batch["x"])["scores"], wanted).backward()

    found = fit_(model, BATCH, "70%", step=step)
    state = [*model.parameters(), *reference.parameters(), *BATCH.values()]
    assert_as_measured(found, lambda: step(model, BATCH), state)


def test_batch_of_a_step_may_be_any_object() -> None:
    """It gets a copy, in each measured step."""
    model = stack()

    def step(model: nn.Module, batches: list[Any]) -> None:
        while batches:
            loss_and_backward(model, batches.pop())

    batches = [dict(BATCH), dict(BATCH)]
    assert fit_(model, batches, "70%", step=step)
    assert len(batches) == 2


def test_gradients_by_autograd_grad_count_as_a_backward() -> None:
    """As in functional loops."""

    def step(model: nn.Module, batch: Any) -> Any:
        return torch.autograd.grad(model(**batch)["loss"], list(model.parameters()))

    assert fit_(stack(), BATCH, "70%", step=step)


OTHER = stack()
ENDLESS = iter(lambda: BATCH, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": 3}, r"step 3 is a int, but it is called in each measured step"),
        (
            {"step": loss_and_backward, "loss": torch.sum},
            r"loss and step are passed, but a step computes its own loss",
        ),
        (
            {"step": lambda model, batch: model(**batch)["loss"]},
            r"step returned without a backward, .* Call backward\(\) on the loss inside of it\.",
        ),
        ({"step": lambda model, batch: None}, r"step returned without a backward, .* Run both"),
        (
            {"step": lambda model, batch: loss_and_backward(OTHER, batch)},
            r"step called none of the model's 4 blocks \(blocks\.0, \.\.\.\), .* Call the model",
        ),
        (
            {"step": lambda model, batch: loss_and_backward(model, next(ENDLESS))},
            r"step reads from a callable_iterator, but .* Use the batch",
        ),
    ],
)
def test_step_that_cannot_be_measured_is_refused(given: Any, said: str) -> None:
    """One sentence says why, and what to pass."""
    with pytest.raises(BudgetError, match=said):
        fit_(stack(), BATCH, "70%", **given)


def test_trainer_that_will_checkpoint_is_refused() -> None:
    """TRL turns on its own checkpointing when training begins."""
    loop = Loop(stack())
    loop.args = type("Settings", (), {"gradient_checkpointing": True})()
    with pytest.raises(BudgetError, match=r"Loop\.args\.gradient_checkpointing is True"):
        fit_(loop.model, BATCH, "70%", step=loop.training_step)


def test_backwards_are_torchs_own_afterwards() -> None:
    """Also after an error."""
    before = torch.autograd.backward, torch.autograd.grad
    with pytest.raises(ZeroDivisionError):
        fit_(stack(), BATCH, "70%", step=lambda *_: 1 / 0)
    assert (torch.autograd.backward, torch.autograd.grad) == before
    assert TARGET.equal(BATCH["target"])
