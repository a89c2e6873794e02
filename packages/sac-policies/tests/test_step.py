"""One training step runs as in training and leaves no state."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sac_policies import BudgetError, fit_
from sac_policies.budget._step import Step


def made(batch: Any = None, loss: Any = None, model: nn.Module | None = None) -> Step:
    """A step of a linear layer on a batch of ones, by default."""
    if model is None:
        model = linear()
    return Step(model, torch.ones(2, 3) if batch is None else batch, loss)


class Calls(nn.Linear):
    """A model that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__(3, 3)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with the arguments."""
        return self.function(*args, **kwargs)


def linear() -> nn.Linear:
    """A layer with fixed weights."""
    torch.manual_seed(0)
    return nn.Linear(3, 3)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (ONE, (ONE,), {}),
        ((ONE, 2), (ONE, 2), {}),
        ({"x": ONE}, (), {"x": ONE}),
        (UserDict(x=ONE), (), {"x": ONE}),
        ([ONE], ([ONE],), {}),
        ((), (), {}),
    ],
    ids=["one", "tuple", "dict", "mapping", "list", "empty"],
)
def test_batch_is_what_the_call_is_given(batch: Any, args: Any, kwargs: Any) -> None:
    """A tuple or mapping is unpacked; anything else is the only argument."""
    given = SimpleNamespace()  # a list would be put back

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        given.args, given.kwargs = args, kwargs
        return torch.ones(1, requires_grad=True)

    run(made(batch, model=Calls(call)))
    assert (given.args, given.kwargs) == (args, kwargs)


def test_gradients_of_two_runs_are_not_added_up() -> None:
    """Each run begins without gradients."""
    model = linear()
    step, found = made(model=model), []
    with step.trials():
        for _ in range(2):
            step.run()
            found.append(model.weight.grad)
    assert found[0] is not found[1]
    assert torch.equal(*found)


W = torch.ones(2, requires_grad=True)


def run(step: Step) -> None:
    """One trial."""
    with step.trials():
        step.run()


def peak(step: Step) -> int:
    """The peak of one trial."""
    with step.trials():
        return step.peak()


def gradients_of(step: Step) -> torch.Tensor:
    """The gradient of W after one trial; none is left behind."""
    with step.trials():
        step.run()
        found = W.grad
    assert W.grad is None
    return found


@pytest.mark.parametrize(
    ("out", "gradient"),
    [
        (lambda: {"loss": (W * 3).sum(), "scores": W * 5}, 3),
        (lambda: SimpleNamespace(loss=(W * 3).sum()), 3),
        (lambda: {"loss": torch.ones(()), "scores": W * 5}, 5),
        (lambda: {"loss": W * 3, "scores": W * 5}, 8),
        (lambda: {"loss": 4.0, "scores": W * 5}, 5),
        (lambda: (W * 2, [W.detach(), (W * 5).half()], 4), 7),
        (lambda: W * 2, 2),
    ],
    ids=["own", "attribute", "constant", "of each", "number", "several", "tensor"],
)
def test_loss_is_the_outputs_own_or_the_sum_of_what_needs_a_gradient(out, gradient: int) -> None:
    """The output's loss is used only if it is a scalar that requires grad."""
    found = gradients_of(made(model=Calls(lambda x: out())))
    assert torch.equal(found, torch.full((2,), float(gradient)))


def test_given_loss_is_taken_before_the_outputs_own() -> None:
    """`loss` is called with the whole output."""
    model = Calls(lambda x: {"loss": W.sum()})
    found = gradients_of(made(loss=lambda out: out["loss"] * 2, model=model))
    assert torch.equal(found, torch.full((2,), 2.0))


def test_output_without_a_gradient_asks_for_a_loss() -> None:
    """The error says how to pass one."""
    with pytest.raises(BudgetError, match=r"fit_: the model's output has no tensor.*Pass loss="):
        run(made(model=Calls(lambda x: {"scores": W.detach()})))


class Wide(nn.Module):
    """Expands one value to 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))
        self.register_buffer("table", torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the result for backward."""
        return (x.view(-1, 1) * self.weight).sin()


def test_peak_has_what_is_there_and_what_grows() -> None:
    """Parameters, buffers and the batch, then values and gradients; equal in each run."""
    model, x = Wide(), torch.ones(64)
    step = made(x, model=model)
    peaks = [peak(step) for _ in range(2)]
    there = (256 + 512 + 64) * 4
    assert peaks[0] == peaks[1]
    assert there + 2 * 64 * 256 * 4 <= peaks[0] < there + 6 * 64 * 256 * 4
    larger = made(torch.ones(128)[:64], model=model)
    assert peak(larger) == peaks[0] + 64 * 4
    model.register_buffer("more", torch.ones(100))
    model.register_parameter("unused", nn.Parameter(torch.ones(10)))
    assert peak(made(x, model=model)) == peaks[0] + 110 * 4


def test_device_is_that_of_the_parameters_or_the_cpu() -> None:
    """A model without parameters is on the CPU."""
    assert made(model=nn.Tanh()).device == torch.device("cpu")
    assert made(model=nn.Linear(2, 2, device="meta")).device == torch.device("meta")


def test_gradients_are_on_inside_whatever_is_around() -> None:
    """Gradients are enabled even under no_grad: a step includes backward."""
    with torch.no_grad(), made().trials():
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("dry", [FakeTensorMode, partial(torch.device, "meta")])
def test_tensors_without_data_are_not_measured(dry: Any) -> None:
    """A step of fake tensors allocates nothing."""
    with dry():
        model, batch = nn.Sequential(nn.Linear(4, 4), nn.SiLU()), torch.ones(2, 4)
        with pytest.raises(BudgetError, match=r"has no data .* python -m sac_policies plan"):
            fit_(model, batch, "50%")
