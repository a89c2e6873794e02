"""Initialise parameters on meta, broadcast values, and move buffers, before a module is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .._errors import ParameterError, StateError
from ..buffers._dtensors import local_of
from ..comm._comm import Communicator


def materialize(
    module: nn.Module,
    *,
    device: torch.device,
    init_fn: Callable[[nn.Module], object] | None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Allocate all tensors on meta, then initialise their modules. Not a collective.

    Every rank draws the same whole tensors from its generator, as one process would. Ignored
    parameters stay as they are.
    """
    beside = set(map(id, ignored))
    fresh, made = _on_meta(module, beside), dict[int, Tensor]()
    for child in fresh:
        for table in (child._parameters, child._buffers):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta or id(tensor) in beside:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device=device)
                    is_param = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (
                        nn.Parameter(empty, tensor.requires_grad) if is_param else empty
                    )
                table[key] = made[id(tensor)]  # type: ignore[assignment]
    for child in fresh:
        if init_fn is not None:
            init_fn(child)
        else:
            child.reset_parameters()  # type: ignore[operator]  # see `check_init`


def check_init(
    module: nn.Module,
    *,
    init_fn: Callable[[nn.Module], object] | None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Refuse meta tensors that nothing would initialise, or not without overwriting others."""
    if init_fn is not None and not callable(init_fn):
        raise StateError(
            f"flat_param.fully_shard: init_fn is {init_fn!r}, but it is called with each module "
            "whose meta parameters have been allocated. Pass a function, or None."
        )
    beside = set(map(id, ignored))
    for child in _on_meta(module, beside):
        if init_fn is None and not hasattr(child, "reset_parameters"):
            raise ParameterError(
                f"flat_param.fully_shard: {type(child).__name__} has tensors on meta and no "
                "reset_parameters, but they need values. Pass init_fn=."
            )
        if any(id(each) in beside and not each.is_meta for each in child.parameters(recurse=False)):
            raise ParameterError(
                f"flat_param.fully_shard: {type(child).__name__} has tensors on meta beside an "
                "ignored parameter that has values, which initialising would overwrite. Give all "
                "of them values before sharding."
            )


def _on_meta(module: nn.Module, beside: set[int]) -> list[nn.Module]:
    """Modules with tensors on meta, if any parameter is there."""

    def has_meta(tensors: Iterable[Tensor]) -> bool:
        return any(tensor.is_meta and id(tensor) not in beside for tensor in tensors)

    if not has_meta(module.parameters()):
        return []
    own = (
        (each, [*each.parameters(recurse=False), *each.buffers(recurse=False)])
        for each in module.modules()
    )
    return [child for child, tensors in own if has_meta(tensors)]


@torch.no_grad()
def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move CPU buffers to the device where the module computes."""
    moved: dict[int, Tensor] = {}
    for owner in module.modules() if device.type != "cpu" else ():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                owner._buffers[key] = moved.setdefault(id(buffer), buffer.to(device))


@torch.no_grad()
def broadcast_module(module: nn.Module, params: Sequence[Tensor], *comms: Communicator) -> None:
    """Give every rank the first rank's parameters and buffers. Collective."""
    for tensor in (*params, *map(local_of, module.buffers())):
        whole = tensor.detach().contiguous()
        for comm in comms:
            comm.broadcast(whole).wait()
        tensor.copy_(whole)
