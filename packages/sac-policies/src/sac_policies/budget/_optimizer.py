"""Bytes of an optimizer's state, including what its first step will allocate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim

from .._errors import BudgetError, shown
from .._tensors import tensors_in

Group = Mapping[str, Any]
"""One of an optimizer's groups of parameters, with its options."""


def _always(count: int) -> Callable[[Group], int]:
    return lambda group: count


_TENSORS: dict[type[optim.Optimizer], Callable[[Group], int]] = {
    optim.Adadelta: _always(2),
    optim.Adagrad: _always(1),
    optim.Adam: lambda group: 3 if group["amsgrad"] else 2,
    optim.AdamW: lambda group: 3 if group["amsgrad"] else 2,
    optim.Adamax: _always(2),
    optim.ASGD: _always(1),
    optim.NAdam: _always(2),
    optim.RAdam: _always(2),
    optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    optim.Rprop: _always(2),
    optim.SGD: lambda group: int(group["momentum"] != 0),
}
"""How many tensors like a parameter its first step makes. Those of one number are left out."""
if hasattr(optim, "Muon"):
    _TENSORS[optim.Muon] = _always(1)


def check_optimizer(optimizer: object) -> None:
    """Refuse objects that are not optimizers, and optimizers whose state is not known.

    Raises:
        BudgetError: the message says what is accepted.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise BudgetError(
            f"sac_policies.fit_: optimizer {shown(optimizer)} is a {type(optimizer).__name__}, "
            "but its state is counted. Pass a torch.optim.Optimizer, or leave it out."
        )
    if type(optimizer) not in _TENSORS and not optimizer.state:
        raise BudgetError(
            f"sac_policies.fit_: optimizer {type(optimizer).__name__} has no state yet, but "
            "only of torch's elementwise optimizers it is known before the first step. Run one "
            "step of it, then call fit_."
        )


def existing_bytes(optimizer: optim.Optimizer, device: torch.device) -> int:
    """Return bytes of an optimizer's present state on a device, without one-element tensors.

    Example:
        >>> existing_bytes(optim.Adam([torch.ones(2, requires_grad=True)]), torch.device("cpu"))
        0
    """
    tensors = tensors_in([dict(each) for each in optimizer.state.values()])
    return sum(_bytes(each) for each in tensors if each.device == device and each.dim())


def state_bytes(optimizer: optim.Optimizer, device: torch.device) -> int:
    """Return bytes of an optimizer's state on a device after its next step.

    For parameters without state, the state that the step will allocate is counted.

    Example:
        >>> state_bytes(optim.Adam([torch.ones(2, requires_grad=True)]), torch.device("cpu"))
        16
    """
    tensors = _TENSORS.get(type(optimizer))
    if tensors is None:
        return existing_bytes(optimizer, device)
    return existing_bytes(optimizer, device) + sum(
        tensors(group) * _bytes(each)
        for group in optimizer.param_groups
        for each in group["params"]
        if each.requires_grad and each.dim() and each.device == device
        if not optimizer.state.get(each)
    )


def _bytes(tensor: torch.Tensor) -> int:
    """Return bytes of a tensor, or of this rank's part of it."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())
