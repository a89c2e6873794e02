"""A module and its optimizer as they were, if what is tried with them fails."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..layout._spec import place_of
from ..memory._dtensors import local_of
from ..memory._host_room import HostRoom
from ..sharded._by_hand import units_at_rest
from ..sharded._full_params import local_state

EXTRA = "_extra_state"  # the last word of torch's keys for `get_extra_state()`


class Kept:
    """What tensors held before they were written to, in CPU memory.

    Args:
        tensors: all that may be written to.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._all = tensors
        self._copies: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._room = HostRoom(tensors)

    def add_all(self) -> None:
        """Copy everything that may be written to."""
        self.add(self._all)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is about to be written to, once."""
        for tensor in tensors:
            key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if tensor.numel() and key not in self._copies:
                self._copies[key] = tensor, self._room.copy(tensor)

    def put_back(self) -> None:
        """Give the tensors what they held; the one that was copied first comes last."""
        with torch.no_grad():
            for tensor, before in reversed(self._copies.values()):
                tensor.copy_(before)


@contextmanager
def put_back_on_error(
    module: nn.Module, optimizer: Optimizer | None, *, later: bool = False
) -> Iterator[Kept]:
    """Put parameters, buffers and optimizer state back if the block raises. Not a collective.

    Takes a copy of this rank's parameters and buffers in CPU memory meanwhile. Optimizer state is
    not copied: `load_state_dict` gives an optimizer new state in the old one's place.

    Args:
        module: sharded, or plain.
        optimizer: of the module.
        later: whether the block itself adds to what is kept, before it writes there.
    """
    units = units_at_rest(module)
    tensors = [part.shard.detach() for unit in units for part in unit.parts]
    rest = local_state(module)
    beside = (v for k, v in rest.items() if isinstance(v, Tensor) and not is_extra(k))
    tensors += [local_of(value).detach() for value in beside]
    kept = Kept(tensors)
    if not later:
        kept.add_all()
    extra = {key: _copied(value) for key, value in rest.items() if is_extra(key)}
    state = None if optimizer is None else (_state_of(optimizer), optimizer.param_groups)
    try:
        yield kept
    except BaseException:
        kept.put_back()
        if optimizer is not None and state is not None:
            optimizer.state, optimizer.param_groups = state
        for unit in units:
            unit.reshard()
        # Last: these are calls of a module's own, and may fail.
        for key, value in extra.items():
            owner_of_extra(module, key).set_extra_state(value)
        raise


def _state_of(optimizer: Optimizer) -> Any:
    """An optimizer's state, not asked for where it lies: what a step left half is refused then.

    Wrapped optimizers, such as accelerate's, have theirs elsewhere.
    """
    own = vars(optimizer)
    if "state" not in own:
        return optimizer.state
    return own["state"]


def _copied(value: Any) -> Any:
    """What a module handed out may be what it goes on changing; some values have no copy."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def is_extra(key: str) -> bool:
    """Whether a key of a state dict is of a module's `get_extra_state()`."""
    return key.rpartition(".")[2] == EXTRA


def owner_of_extra(module: nn.Module, key: str) -> nn.Module:
    """The module whose extra state is under a key."""
    return place_of(module, key)[1]
