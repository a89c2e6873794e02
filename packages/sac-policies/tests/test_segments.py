"""Sequentials without repeated blocks are divided into segments of consecutive children."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from sac_policies import fit_
from sac_policies.budget import InPlaceFit
from sac_policies.budget._step import Step

from ._fitted import own_forwards, peak_growth

IMAGES = torch.linspace(-1, 1, 4 * 3 * 24 * 24).view(4, 3, 24, 24)


def convolution(inputs: int = 16) -> list[nn.Module]:
    """A convolution and its activation."""
    return [nn.Conv2d(inputs, 16, 3, padding=1), nn.ReLU()]


def flat() -> nn.Sequential:
    """Eight convolutions in one list of layers."""
    return nn.Sequential(*convolution(3), *(each for _ in range(7) for each in convolution()))


def nested() -> nn.Sequential:
    """The same in lists of two layers."""
    return nn.Sequential(nn.Sequential(*convolution(3)), *(pair() for _ in range(7)))


def pair() -> nn.Sequential:
    """A list of two layers."""
    return nn.Sequential(*convolution())


def hooked() -> nn.Sequential:
    """Hooks of the model and of its layers change values; the first layers are frozen."""
    model = flat()
    model[:4].requires_grad_(False)
    model.register_forward_pre_hook(lambda module, given: (given[0] * 0.9,))
    model[8].register_forward_hook(lambda module, given, out: out * 1.1)
    model[9].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return model


class Features(nn.Module):
    """Layers with batch norm and dropout; all share one activation. A head follows."""

    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        layers: list[nn.Module] = []
        for at in range(6):
            layers += [nn.Conv2d(16 if at else 3, 16, 3, padding=1), nn.BatchNorm2d(16), relu]
        self.features = nn.Sequential(*layers, nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score images."""
        return self.head(self.features(x).mean((2, 3)))


class OneByOne(nn.Module):
    """Calls the layers of a Sequential itself, and returns all results."""

    def __init__(self) -> None:
        super().__init__()
        self.features = flat()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the result of each layer."""
        found = []
        for layer in self.features:
            x = layer(x)
            found.append(x)
        return found


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with fixed weights."""
    torch.manual_seed(0)
    return make()


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Gradients and buffers of two steps."""
    found = []
    for step in range(2):
        torch.manual_seed(step)
        model.zero_grad()
        model(IMAGES).square().mean().backward()
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        found += [each.clone() for each in model.buffers()]
    return found


def fitted(model: nn.Module, budget: Any) -> InPlaceFit:
    """Fit a model that fits."""
    found = fit_(model, IMAGES, budget)
    assert isinstance(found, InPlaceFit), found
    return found


def test_flat_sequential_needs_no_more_than_with_checkpoint_sequential() -> None:
    model = made(flat)

    def step() -> None:
        out = checkpoint_sequential(model, 4, IMAGES, use_reentrant=False)
        out.square().mean().backward()

    step()
    model.zero_grad()
    torchs = peak_growth(step, device=IMAGES.device)
    model.zero_grad()
    smallest = fit_(model, IMAGES, 1)
    resident = IMAGES.nbytes + sum(each.nbytes for each in model.parameters())
    assert not smallest
    assert smallest.smallest_bytes - resident <= torchs


@pytest.mark.parametrize(
    ("make", "share"),
    [(flat, 0.68), (flat, 0.8), (nested, 0.68), (hooked, 0.75), (Features, 0.55)],
)
def test_segments_train_bit_identically_and_undo_leaves_nothing(make: Any, share: float) -> None:
    plain, model = made(make), made(make)
    structure = [name for name, _ in model.named_modules()]
    found = fitted(model, share)
    assert any("-" in region.path for region in found.regions)
    assert [name for name, _ in model.named_modules()] == structure
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, trained(plain), trained(model)))
    found.undo()
    assert own_forwards(model) == []


def test_nothing_is_left_if_no_division_fits() -> None:
    model = made(flat)
    assert not fit_(model, IMAGES, 1)
    assert own_forwards(model) == []


def test_error_in_a_measured_step_restores_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any step, also in those of the segments."""
    run, left = Step._run, itertools.repeat(True)

    def refusing(step: Step, *given: Any) -> None:
        if next(left, None) is None:
            raise RuntimeError("no more")
        counted.append(None)
        run(step, *given)

    monkeypatch.setattr(Step, "_run", refusing)
    model, counted = made(flat), list[None]()
    assert not fit_(model, IMAGES, 1)
    assert len(counted) > 8
    for allowed in range(0, len(counted), 4):
        left = itertools.repeat(True, allowed)
        with pytest.raises(RuntimeError, match="no more"):
            fit_(model, IMAGES, 1)
        assert own_forwards(model) == []


def test_layers_replaced_and_added_after_fit_are_run() -> None:
    plain, model = made(flat), made(flat)
    fitted(model, 0.68)
    for each in (plain, model):
        each[1], each[8] = nn.Tanh(), nn.Identity()
        each.append(nn.Sigmoid())
    assert all(map(torch.equal, trained(plain), trained(model)))


def test_copy_of_a_divided_model_is_its_own() -> None:
    plain, model = made(flat), made(flat)
    fitted(model, 0.68)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other[0].weight.mul_(2)
        changed = copy.deepcopy(plain)
        changed.load_state_dict(other.state_dict())
        assert all(map(torch.equal, trained(changed), trained(other)))
        found = fitted(other, 0.68)
        assert all(map(torch.equal, trained(changed), trained(other)))
        found.undo()
        assert own_forwards(other) == []
    assert own_forwards(model) == [""]


def test_layers_called_one_by_one_are_not_divided() -> None:
    model = OneByOne()
    found = fit_(model, IMAGES, "70%", loss=lambda outs: outs[-1].square().mean())
    assert not found
    assert own_forwards(model) == []


def test_large_entry_is_a_segment_without_its_neighbours() -> None:
    """A layer that keeps most of the bytes is recomputed with few others."""
    wide = nn.Sequential(nn.Conv2d(16, 128, 1), nn.Tanh(), nn.Conv2d(128, 16, 1))
    layers = [*convolution(3), *(each for _ in range(5) for each in convolution())]
    model = made(lambda: nn.Sequential(*layers[:6], wide, *layers[6:]))
    plain = copy.deepcopy(model)
    smallest = fit_(model, IMAGES, 1)
    assert not smallest
    assert fitted(model, smallest.smallest_bytes).peak_bytes <= smallest.smallest_bytes
    assert all(map(torch.equal, trained(plain), trained(model)))
