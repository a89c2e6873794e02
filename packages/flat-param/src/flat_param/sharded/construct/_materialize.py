"""Initialise parameters on meta, and move buffers, before a module is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..._errors import ParameterError, StateError
from ..._torch_compat import post_accumulate_grad_hooks
from ..tensor._param_piece import mark_replaced


def materialize(
    module: nn.Module,
    *,
    device: torch.device,
    init_fn: Callable[[nn.Module], object] | None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Allocate all tensors on meta, then initialise their modules. Not a collective.

    Every rank draws the same whole tensors from its generator, as one process would. Tensors that
    have values keep them, and ignored parameters stay as they are.
    """
    beside, made = set(map(id, ignored)), dict[int, Tensor]()
    fresh = _on_meta(module, beside)
    tensors = [tensor for child in fresh for tensor in _own_tensors(child)]
    kept = {id(each): (each, each.detach().clone()) for each in tensors if not each.is_meta}
    for child in fresh:
        for table in (child._parameters, child._buffers):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta or id(tensor) in beside:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _allocated(tensor, key, device)
                table[key] = made[id(tensor)]  # type: ignore[assignment]
    for child in fresh:
        if init_fn is not None:
            init_fn(child)
        else:
            child.reset_parameters()  # type: ignore[operator]  # see `check_init`
    with torch.no_grad():
        for tensor, values in kept.values():
            tensor.copy_(values)


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _allocated(tensor: Tensor, key: str, device: torch.device) -> Tensor:
    """Return an uninitialised tensor for one on meta.

    A parameter stays the same object, so that an optimizer trains it. torch cannot do that for one
    with weak references; then another takes its place, and an optimizer with the old one raises.
    """
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    found = nn.Parameter(empty, tensor.requires_grad)
    vars(found).update(vars(tensor))
    found.__class__ = type(tensor)
    for hook in (post_accumulate_grad_hooks(tensor) or {}).values():
        found.register_post_accumulate_grad_hook(hook)
    try:
        torch.utils.swap_tensors(tensor, found)
    except RuntimeError:
        mark_replaced(tensor, name=key)
        return found
    return tensor


def check_init(
    module: nn.Module,
    *,
    init_fn: Callable[[nn.Module], object] | None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Refuse meta tensors that nothing would initialise."""
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
                "reset_parameters, but they need values. Pass init_fn=, a function that gives a "
                "module its values, such as the model's _init_weights; or init_fn=lambda module: "
                "None if you load values afterwards."
            )


def _on_meta(module: nn.Module, beside: set[int]) -> list[nn.Module]:
    """Modules with tensors on meta, if any parameter is there."""

    def has_meta(tensors: Iterable[Tensor]) -> bool:
        return any(tensor.is_meta and id(tensor) not in beside for tensor in tensors)

    if not has_meta(module.parameters()):
        return []
    return [child for child in module.modules() if has_meta(_own_tensors(child))]


@torch.no_grad()
def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move CPU buffers to the device where the module computes."""
    moved: dict[int, Tensor] = {}
    for owner in module.modules() if device.type != "cpu" else ():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                owner._buffers[key] = moved.setdefault(id(buffer), buffer.to(device))
