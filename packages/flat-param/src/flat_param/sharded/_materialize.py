"""Initialise parameters on meta, broadcast values, and move buffers, before a module is sharded."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import ParameterError, StateError
from ..buffers._dtensors import local_of
from ..comm._comm import Communicator
from ..layout._spec import place_of


def materialize(
    module: nn.Module,
    *,
    device: torch.device,
    init_fn: Callable[[nn.Module], None] | None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Allocate and initialise all tensors on meta, module by module. Not a collective.

    Every rank draws the same whole tensors from its generator, as one process would. If an error or
    interrupt stops it, all tensors return to meta, so that the next call does not take
    uninitialised memory for values. Ignored parameters stay as they are; `init_fn` sees meta
    tensors in their place.
    """
    beside = {id(param) for param in ignored}
    named = module.named_parameters(remove_duplicate=False)
    names = [name for name, p in named if p.is_meta and id(p) not in beside]
    if not names:
        return
    fresh = [child for child in module.modules() if _has_meta(child, beside)]
    tables: list[dict[str, Any]] = [
        table for child in fresh for table in (child._parameters, child._buffers)
    ]
    before = [dict(table) for table in tables]
    is_done = False
    try:
        for table in tables:
            for key, tensor in table.items():
                if id(tensor) in beside:
                    stand_in = torch.empty_like(tensor, device="meta")
                    table[key] = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
        _fill(module, names, fresh, device=device, init_fn=init_fn)
        is_done = True
    finally:
        for table, entries in zip(tables, before, strict=True):
            for key, tensor in entries.items():
                if not is_done or id(tensor) in beside:
                    table[key] = tensor


def _fill(
    module: nn.Module,
    names: Sequence[str],
    fresh: Sequence[nn.Module],
    *,
    device: torch.device,
    init_fn: Callable[[nn.Module], None] | None,
) -> None:
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(module.get_parameter(name)), name) for name in names}
    for child in fresh:
        child.to_empty(device=device, recurse=False)
    for name, tied in ties.items():
        if name != tied:
            _, owner, key = place_of(module, name)
            owner._parameters[key] = module.get_parameter(tied)
    for child in fresh:
        _init_of(child, init_fn)()


def check_init(
    module: nn.Module,
    *,
    init_fn: Callable[[nn.Module], None] | None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Refuse a module with meta tensors that nothing would initialise.

    Raises:
        ParameterError: it has neither `init_fn` nor `reset_parameters`.
        StateError: `init_fn` is not a function.
    """
    if init_fn is not None and not callable(init_fn):
        raise StateError(
            f"flat_param.fully_shard: init_fn is {init_fn!r}, but it is called with each module "
            "whose meta parameters have been allocated. Pass a function, or None."
        )
    beside = {id(param) for param in ignored}
    if any(param.is_meta and id(param) not in beside for param in module.parameters()):
        for child in module.modules():
            if _has_meta(child, beside):
                _init_of(child, init_fn)


def _has_meta(module: nn.Module, ignored: Container[int]) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta and id(tensor) not in ignored for tensor in own)


def _init_of(
    module: nn.Module, init_fn: Callable[[nn.Module], None] | None
) -> Callable[[], object]:
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    if init_fn is not None:
        return partial(init_fn, module)
    if reset is None:
        raise ParameterError(
            f"flat_param.fully_shard: {type(module).__name__} has tensors on meta and no "
            "reset_parameters, but they need values. Pass init_fn=."
        )
    return reset


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
