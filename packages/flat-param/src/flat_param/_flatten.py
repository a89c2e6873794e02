"""Edge: flattens a module in place, or refuses it before anything changes."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from ._aliasing import is_watched
from ._errors import ParameterError, StateError
from ._flat_params import FlatParams
from ._layout import DEFAULT_ALIGN_BYTES
from ._stores import Stores


def flatten(module: nn.Module, *, align_bytes: int = DEFAULT_ALIGN_BYTES) -> FlatParams:
    """Make a module's parameters views of one buffer per dtype and trainability, in place.

    Takes extra memory for one parameter at a time on CPU, whose pages come at first touch; on
    other devices the buffer is whole from the start.

    Args:
        module: with at least one parameter; all on one device; not flattened already.
        align_bytes: start of each parameter, bytes; a power of two; 1 leaves no gaps, so a vector
            is exactly the parameters one after another.

    Returns:
        The flat view. The module keeps it alive.

    Raises:
        ParameterError: no parameters, or parameters that are lazy, on different devices, or share
            memory without being one parameter.
        StateError: the module or a module inside it is flattened already.
        LayoutError: `align_bytes` is not a power of two.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(3, 2)
        >>> flat = flatten(layer)
        >>> flat.as_vector()[:6].data_ptr() == layer.weight.data_ptr()
        True
    """
    _check(module)
    stores = Stores(module, align_bytes=align_bytes)
    flat = FlatParams(stores)
    _bind(flat, stores)
    return flat


def flat_params_of(module: nn.Module) -> FlatParams | None:
    """The flat view of a root that `flatten` was called on, such as a deep copy or a loaded one.

    Example:
        >>> import copy, torch, flat_param
        >>> layer = torch.nn.Linear(2, 2)
        >>> flat = flat_param.flatten(layer)
        >>> flat_param.flat_params_of(copy.deepcopy(layer)).numel
        8
    """
    return module.__dict__.get("_flat_params")


def _bind(flat: FlatParams, stores: Stores) -> None:
    """Attach a flat view to its root: forward pre-hook, `_apply`, `zero_grad`, and itself."""
    stores.module.register_forward_pre_hook(stores.before_forward)
    stores.module.__dict__.update(
        _flat_params=flat, _apply=stores.apply_module, zero_grad=stores.zero_module_grad
    )


def _check(module: nn.Module) -> None:
    """Refuse a module that cannot be flattened, before anything changes."""
    if next(module.parameters(), None) is None:
        raise ParameterError(
            f"flat_param.flatten: {type(module).__name__} has no parameters, but at least one is "
            "needed. Skip modules without parameters."
        )
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ParameterError(
                f"flat_param.flatten: parameter '{name}' has no shape yet, but it needs a place. "
                "Run one forward first."
            )
    for name, submodule in module.named_modules():
        if is_watched(submodule):
            raise StateError(
                f"flat_param.flatten: module '{name}' is flattened already, but a parameter lies "
                "in one buffer. Use the FlatParams of the first call."
            )
