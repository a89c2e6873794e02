"""Restore a module and its optimizer after a failed load."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..buffers._dtensors import local_of
from ..layout._spec import place_of
from ..sharded._by_hand import units_at_rest
from ..sharded._full_params import local_state
from ._optim_state import state_of

EXTRA = "_extra_state"  # the last word of torch's keys for `get_extra_state()`


@contextmanager
def put_back_on_error(module: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Restore parameters, buffers and optimizer state if the block raises. Not a collective.

    Needs CPU memory for a copy of this rank's parameters and buffers. Optimizer state is not
    copied, since `load_state_dict` replaces it by new tensors.
    """
    units = units_at_rest(module)
    tensors = [part.shard.detach() for unit in units for part in unit.parts]
    rest = local_state(module)
    beside = (v for k, v in rest.items() if isinstance(v, Tensor) and not is_extra(k))
    tensors += [local_of(value).detach() for value in beside]
    copies = [tensor.to("cpu", copy=True) for tensor in tensors]
    extra = {key: _copied(value) for key, value in rest.items() if is_extra(key)}
    if not hasattr(optimizer, "param_groups"):  # the `with` block raises for it
        optimizer = None
    state = None if optimizer is None else (state_of(optimizer), optimizer.param_groups)
    options = None if optimizer is None else [dict(group) for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, before in zip(tensors, copies, strict=True):
                tensor.copy_(before)
        if optimizer is not None and state is not None and options is not None:
            optimizer.state, optimizer.param_groups = state
            for group, before_group in zip(optimizer.param_groups, options, strict=True):
                group.update(before_group)
        for unit in units:
            unit.reshard()
        # Last: these call methods of the module, which may fail.
        for key, value in extra.items():
            place_of(module, key)[1].set_extra_state(value)
        raise


def _copied(value: Any) -> Any:
    """Return a deep copy if possible, since the module may change the value later."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def is_extra(key: str) -> bool:
    """Whether a key of a state dict is for a module's `get_extra_state()`."""
    return key.rpartition(".")[2] == EXTRA
