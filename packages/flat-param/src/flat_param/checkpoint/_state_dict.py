"""Whole state dicts of a sharded module and its optimizer, with the plain module's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .._errors import StateError
from ._optim_state import full_optimizer_state, load_optimizer_state
from ._put_back import put_back_on_error


def full_state_dict(module: nn.Module, *, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Whole tensors under the plain module's keys, on every rank. Collective.

    Returns:
        `{"model": {name: tensor}}`, and with an optimizer
        `"optim": {"state": {name: {key: value}}, "param_groups": [...]}`.
    """
    state: dict[str, Any] = {"model": module.state_dict()}
    if optimizer is not None:
        state["optim"] = full_optimizer_state(module, optimizer)
    return state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, optimizer: Optimizer | None = None
) -> None:
    """Load whole tensors; each rank keeps its part. Not a collective.

    After an error, parameters, buffers and optimizer state are what they were on this rank. Takes
    memory for one more copy of them meanwhile.

    Args:
        module: sharded, or plain.
        state: what `full_state_dict` returns, or a plain module's state dict.
        optimizer: of the module; needs `state["optim"]`, by name or by position.
    """
    nested = isinstance(state.get("model"), Mapping)
    if optimizer is not None and (not nested or "optim" not in state):
        raise StateError(
            f"flat_param.load_full_state_dict: the state has the keys {sorted(state)[:4]}, but an "
            "optimizer is loaded from 'optim' beside 'model'. Leave the optimizer out."
        )
    with put_back_on_error(module, optimizer):
        module.load_state_dict(state["model"] if nested else state)
        if optimizer is not None:
            load_optimizer_state(module, optimizer, state["optim"])


def optimizer_state_by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer part of a full state dict as `torch.optim.Optimizer.load_state_dict` takes it.

    Example:
        >>> named = {"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
        >>> optimizer_state_by_position(named)["state"]
        {0: {'step': 1}}
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    position = {name: index for index, name in enumerate(names)}
    return {
        "state": {position[name]: value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [position[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }
