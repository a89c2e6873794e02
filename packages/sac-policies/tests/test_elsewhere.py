"""Blocks that other code recomputes are found, and `fit_` says how to turn that off."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from sac_policies import fit_
from sac_policies.budget import Infeasible, InPlaceFit

from ._blocks import Block, Stack
from ._fitted import BATCH, training

recompute = functools.partial(checkpoint, use_reentrant=False)


class Switched(Block):
    """A block with a switch, as transformers and diffusers have."""

    gradient_checkpointing = False

    def forward(self, x: torch.Tensor, *, mask: Any = None) -> torch.Tensor:
        """Apply the block."""
        if self.gradient_checkpointing and self.training:
            return recompute(functools.partial(Block.forward, self, mask=mask), x)
        return super().forward(x, mask=mask)


class WithSwitch(Stack):
    """Blocks with a switch for all of them, or for every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Switched() for _ in range(4))

    def gradient_checkpointing_enable(self, every: int = 1) -> None:
        """Turn it on."""
        for number, block in enumerate(self.blocks):
            block.gradient_checkpointing = number % every == 0

    def gradient_checkpointing_disable(self) -> None:
        """Turn it off."""
        for block in self.blocks:
            block.gradient_checkpointing = False


class InCode(Stack):
    """A forward that calls torch's checkpoint."""

    def forward(self, x: torch.Tensor, **given: Any) -> dict[str, torch.Tensor]:
        """Recompute each block."""
        x = self.first(x)
        for block in self.blocks:
            x = recompute(block, x)
        return {"scores": self.head(x)}


def switched() -> nn.Module:
    """The switch is on."""
    model = WithSwitch()
    model.gradient_checkpointing_enable()
    return model


def wrapped() -> nn.Module:
    """Torch's wrapper, which FSDP's setting uses as well."""
    model = Stack()
    model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    return model


def by_ckpt_wrap() -> nn.Module:
    """Another library that changes modules in place."""
    model = Stack()
    pytest.importorskip("ckpt_wrap").checkpoint_layers_(model)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            switched,
            r"recomputed by gradient_checkpointing, .* model\.gradient_checkpointing_disable",
        ),
        (wrapped, r"recomputed by torch's checkpoint_wrapper: .*activation_checkpointing=False"),
        (by_ckpt_wrap, r"recomputed by ckpt_wrap: .* call ckpt_wrap\.unwrap\(model\) before fit_"),
        (InCode, r"recomputed by code in a forward: .* take its calls of checkpoint out"),
    ],
)
def test_model_that_is_recomputed_already_is_said(make: Callable[[], nn.Module], said: str) -> None:
    """If nothing fits, and if the budget is met; a measured step does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        none = fit_(make(), BATCH, "50%")
        assert isinstance(none, Infeasible)
        assert f"{none}".count("blocks.0 to blocks.3 are") == 1
        found = fit_(make(), BATCH, 1.0)
    assert isinstance(found, InPlaceFit)
    for each in (str(none), str(found), none.cause, found.elsewhere):
        assert re.search(said, each)


def test_blocks_that_others_leave_alone_are_fitted() -> None:
    """Of a switch for every second block, the others are checkpointed; gradients are equal."""
    torch.manual_seed(0)
    model, plain = WithSwitch(), WithSwitch()
    plain.load_state_dict(model.state_dict())
    model.gradient_checkpointing_enable(every=2)
    found = fit_(model, BATCH, "80%")
    assert isinstance(found, InPlaceFit)
    levels = [region.level for region in found.regions]
    assert levels[0] == levels[2] == "keeps everything"
    assert {levels[1], levels[3]} != {"keeps everything"}
    assert "blocks.0 to blocks.2 are recomputed" in found.elsewhere
    assert all(map(torch.equal, training(model), training(plain)))


def test_plain_model_has_nothing_to_say() -> None:
    """Also with a switch that is off."""
    found = fit_(WithSwitch(), BATCH, "60%")
    assert isinstance(found, InPlaceFit)
    assert found.elsewhere == ""
    assert "recomputed" not in str(found)


def turn_on(model: Any) -> None:
    """Its own switch."""
    model.gradient_checkpointing_enable()


def wrap(model: Any) -> None:
    """Torch's wrapper around fitted blocks."""
    model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))


def wrap_by_ckpt_wrap(model: Any) -> None:
    """Another library."""
    pytest.importorskip("ckpt_wrap").checkpoint_layers_(model)


@pytest.mark.parametrize("later", [turn_on, wrap, wrap_by_ckpt_wrap])
def test_checkpointing_after_fit_warns_once(later: Callable[[Any], None]) -> None:
    """In the next step, which has the plain gradients; a step before does not warn."""
    torch.manual_seed(0)
    model, plain = WithSwitch(), WithSwitch()
    plain.load_state_dict(model.state_dict())
    assert fit_(model, BATCH, "45%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(model)
    later(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = training(model)
    assert len(caught) == 1
    assert "a fitted Switched is also recomputed by" in str(caught[0].message)
    assert "gradient_checkpointing=False" in str(caught[0].message)
    assert all(map(torch.equal, found, training(plain)))
