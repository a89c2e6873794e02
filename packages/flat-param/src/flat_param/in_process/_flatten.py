"""Flatten a module in place, or refuse it before anything changes."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from .._errors import ParameterError, StateError
from ..buffers._owners import check_whole, owner_of
from ..layout._arguments import check_is_module
from ..layout._layout import DEFAULT_ALIGN_BYTES
from ._flat_params import FlatParams
from ._flat_segments import ATTRIBUTE, FlatSegments


def flatten(module: nn.Module, *, align_bytes: int = DEFAULT_ALIGN_BYTES) -> FlatParams:
    """Make a module's parameters views of one buffer per dtype and trainability, in place.

    On CPU this needs extra memory for one parameter at a time, since pages are provided at first
    touch; on other devices the whole buffer is allocated first.

    Args:
        module: with at least one parameter; all on one device; not flattened already.
        align_bytes: alignment of each parameter in bytes; a power of two; with 1 there are no gaps,
            so a vector is the plain concatenation of the parameters.

    Returns:
        The flat view. The module keeps it alive.

    Raises:
        ParameterError: no parameters, or parameters that are lazy, on different devices, sharded,
            in the buffer of another flattened module, or share memory without being one parameter.
        StateError: the module or a module inside it is flattened already.
        LayoutError: `align_bytes` is not a power of two.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(3, 2)
        >>> flat = flatten(layer)
        >>> flat.as_vector()[:6].data_ptr() == layer.weight.data_ptr()
        True
    """
    check_is_module("flatten", module)
    _check(module)
    return FlatParams(module, FlatSegments(module, align_bytes=align_bytes))


def unflatten(module: nn.Module) -> None:
    """Undo `flatten`, in place.

    Parameters and gradients stay the same objects with their present values, and each gets
    separate memory. Optimizers over parameters, and hooks on them, keep working. Nothing of this
    package remains on the module. The call needs memory for everything a second time.

    Its FlatParams cannot be used afterwards, and stepping its chunks is an error.

    Args:
        module: a root that was passed to `flatten`, or a deep copy or loaded copy of it.

    Raises:
        StateError: the module is not such a root.

    Example:
        >>> import torch, flat_param
        >>> layer = torch.nn.Linear(3, 2)
        >>> flat = flat_param.flatten(layer)
        >>> flat_param.unflatten(layer)
        >>> layer.weight = torch.nn.Parameter(torch.ones(4, 3))
        >>> flat_param.flatten(layer).numel
        16
    """
    check_is_module("unflatten", module)
    segments: FlatSegments | None = vars(module).get(ATTRIBUTE)
    if segments is None:
        inside = any(map(owner_of, module.parameters()))
        raise StateError(
            f"flat_param.unflatten: {type(module).__name__} is "
            f"{'not the root of a flattened module' if inside else 'not flattened'}, but only what "
            "flatten was called on can be. Pass that module."
        )
    segments.close(module)


def flat_params_of(module: nn.Module) -> FlatParams | None:
    """Return the flat view of a flattened root, such as a deep copy or a loaded module.

    Example:
        >>> import copy, torch, flat_param
        >>> layer = torch.nn.Linear(2, 2)
        >>> flat = flat_param.flatten(layer)
        >>> flat_param.flat_params_of(copy.deepcopy(layer)).numel
        8
    """
    check_is_module("flat_params_of", module)
    segments = vars(module).get(ATTRIBUTE)
    return None if segments is None else FlatParams(module, segments)


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
        if not param.is_leaf:
            raise ParameterError(
                f"flat_param.flatten: parameter '{name}' is computed from another tensor, but only "
                "a leaf can be moved into a buffer. Remove what computes it."
            )
    if any(ATTRIBUTE in vars(submodule) for submodule in module.modules()):
        raise StateError(
            f"flat_param.flatten: {type(module).__name__}, or a module inside it, is flattened "
            "already, but a parameter can be in one buffer only. Use the FlatParams of the first "
            "call, or call unflatten first."
        )
    check_whole("flatten", module.named_parameters())
    for name, submodule in module.named_modules():
        if hasattr(submodule, "_flat_param"):
            raise ParameterError(
                f"flat_param.flatten: module {name or type(module).__name__!r} is sharded by "
                "fully_shard, so this rank has pieces of its parameters, but only whole parameters "
                "can be flattened. Give the optimizer module.parameters(), or flatten modules that "
                "are not sharded."
            )
