"""A model of other people: how it is made and called, and which of its modules are blocks."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 48
IDS = torch.arange(12).view(2, 6)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)


def need(name: str) -> ModuleType:
    """A library, or a skip that says why it cannot be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # what a library raises when something of its own is missing
        pytest.skip(f"{name} cannot be imported: {error}")


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and which of its modules are its blocks."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...] = ()
    """Names of the blocks' classes; none for those transformers itself would checkpoint."""

    def build(self) -> nn.Module:
        """The model, in training, with weights that depend on nothing but its name."""
        need(self.library)
        torch.manual_seed(len(self.name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make().train()

    def blocks_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks by name; at least one."""
        if self.blocks:
            found = {n: m for n, m in model.named_modules() if type(m).__name__ in self.blocks}
        else:
            layer = need("transformers.modeling_layers").GradientCheckpointingLayer
            found = {n: m for n, m in model.named_modules() if isinstance(m, layer)}
        assert found, f"{self.name} has no blocks"
        return found

    def outer_blocks_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks that lie in no other block."""
        found = self.blocks_of(model)
        return {
            name: block
            for name, block in found.items()
            if not any(name.startswith(f"{other}.") for other in found)
        }

    def loss(self, model: nn.Module) -> Tensor:
        """A scalar of a forward whose random numbers are always the same."""
        torch.manual_seed(1)
        out = model(**self.inputs())
        if getattr(out, "loss", None) is not None:
            return out.loss
        for name in ("logits", "logits_per_image", "sample", "last_hidden_state", "pooler_output"):
            if getattr(out, name, None) is not None:
                return getattr(out, name).pow(2).mean()
        return out.pow(2).mean()


def without_cache(*models: nn.Module) -> tuple[nn.Module, ...]:
    """The same models; a block that is profiled alone would grow their cache."""
    for module in (part for model in models for part in model.modules()):
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return models


def calls_of(
    case: Case, model: nn.Module
) -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """What each outer block is called with, by its name; gradients reach what they reached."""
    calls: dict[str, Any] = {}
    handles = [
        block.register_forward_pre_hook(
            lambda m, args, kwargs, name=name: calls.update({name: (m, args, kwargs)}),
            with_kwargs=True,
        )
        for name, block in case.outer_blocks_of(model).items()
    ]
    case.loss(model)
    for handle in handles:
        handle.remove()

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return value.detach().requires_grad_()
        return value

    return {
        name: (
            block,
            tuple(fresh(arg) for arg in args),
            {key: fresh(value) for key, value in kwargs.items()},
        )
        for name, (block, args, kwargs) in calls.items()
    }
