"""A model of another library: how to build and call it, and which modules are its blocks."""

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
    """Import a library, or skip with the reason why it cannot be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # from broken dependencies of the library
        pytest.skip(f"{name} cannot be imported: {error}")


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and its block class."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...] = ()
    """Names of the blocks' classes; none for those transformers itself would checkpoint."""

    def build(self) -> nn.Module:
        """Build the model in training mode, with weights that depend only on its name."""
        need(self.library)
        torch.manual_seed(len(self.name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make().train()

    def blocks_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks by name; at least one."""
        if self.blocks:
            found = {n: m for n, m in model.named_modules() if type(m).__name__ in self.blocks}
        else:
            layer = need("transformers.modeling_layers").GradientCheckpointingLayer
            found = {n: m for n, m in model.named_modules() if isinstance(m, layer)}
        assert found, f"{self.name} has no blocks"
        return found

    def outer_blocks_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks that are in no other block."""
        found = self.blocks_of(model)
        return {
            name: block
            for name, block in found.items()
            if not any(name.startswith(f"{other}.") for other in found)
        }

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of a forward with fixed random numbers."""
        torch.manual_seed(1)
        out = model(**self.inputs())
        if getattr(out, "loss", None) is not None:
            return out.loss
        for name in ("logits", "logits_per_image", "sample", "last_hidden_state", "pooler_output"):
            if getattr(out, name, None) is not None:
                return getattr(out, name).pow(2).mean()
        return out.pow(2).mean()


def without_cache(*models: nn.Module) -> tuple[nn.Module, ...]:
    """Return the models without caches: profiling a single block would fill its cache."""
    for module in (part for model in models for part in model.modules()):
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return models


def calls_of(
    case: Case, model: nn.Module
) -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each outer block by name, with gradients flowing as before."""
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
