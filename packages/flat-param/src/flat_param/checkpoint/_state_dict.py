"""Whole state dicts of a sharded module and its optimizer, with the plain module's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import StateError
from ..memory._dtensors import is_dtensor
from ..sharded._by_hand import units_below
from ..sharded._full_params import handing_out, named_sites
from ..sharded._sharded_params import as_gathered
from ._full_optim_state import full_optimizer_state
from ._optim_state import load_optimizer_state
from ._put_back import put_back_on_error


def full_state_dict(
    module: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> dict[str, Any]:
    """Whole tensors under the plain module's keys, on every rank. Collective.

    Args:
        module: sharded, or plain.
        optimizer: of the module.
        rank0_only: keep it on the first rank that shares the module; the others have no more than
            one unit's whole parameters at a time, and get empty dicts.
        offload_to_cpu: put it in CPU memory, each unit's as soon as it is whole; DTensors stay
            where they are.

    Returns:
        `{"model": {name: tensor}}`, and with an optimizer
        `"optim": {"state": {name: {key: value}}, "param_groups": [...]}`.

    Raises:
        StateError: with `rank0_only`, a parameter is a DTensor, of which no rank has all.
    """
    keeps = not rank0_only or _is_first(module)
    hands_out = (_on_cpu if offload_to_cpu else as_gathered) if keeps else _dropped
    with handing_out(module, hands_out):
        state: dict[str, Any] = {"model": module.state_dict()}
    if optimizer is not None:
        state["optim"] = full_optimizer_state(module, optimizer, hands_out=hands_out)
    if not keeps:
        return {part: {} for part in state}
    if offload_to_cpu:  # what no unit has gathered
        for values in (state["model"], *state.get("optim", {}).get("state", {}).values()):
            for key, value in values.items():
                values[key] = value.cpu() if _may_move(value) else value
    return state


def _is_first(module: nn.Module) -> bool:
    """Whether this is the first of all ranks that share a module.

    Raises:
        StateError: see `full_state_dict`.
    """
    units = list(units_below(module))
    for name, param in module.named_parameters():
        if is_dtensor(param):
            raise _no_whole(name)
    for name, site in named_sites(module):
        if site.part.places[site.index] is not None:
            raise _no_whole(name)
    return not any(
        comm.rank for unit in units[:1] for comm in (unit.comms.gather, unit.comms.replicate)
    )


def _no_whole(name: str) -> StateError:
    return StateError(
        f"flat_param.full_state_dict: parameter '{name}' is a DTensor, but rank0_only puts "
        "everything on one rank, and no rank has all of a DTensor. Use save_sharded, or leave "
        "rank0_only out."
    )


def _on_cpu(full: Tensor) -> Tensor:
    return full.cpu()


def _dropped(full: Tensor) -> Tensor:
    return full.new_empty(full.shape, device="meta")


def _may_move(value: object) -> bool:
    return isinstance(value, Tensor) and not is_dtensor(value)


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, optimizer: Optimizer | None = None
) -> None:
    """Load whole tensors; each rank keeps its part. Not a collective.

    After an error, parameters, buffers and optimizer state are what they were on this rank. Takes
    memory for one more copy of them meanwhile.

    Args:
        module: sharded, or plain.
        state: what `full_state_dict` returns, or a plain module's state dict.
        optimizer: of the module; needs `state["optim"]`, by name or by position. Its groups may be
            in another order than the saved ones, if names were saved.
    """
    nested = isinstance(state.get("model"), Mapping)
    if optimizer is not None and (not nested or "optim" not in state):
        raise StateError(
            f"flat_param.load_full_state_dict: the state has the keys {sorted(state)[:4]}, but an "
            "optimizer is loaded from 'optim' next to 'model'. Leave the optimizer out."
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
