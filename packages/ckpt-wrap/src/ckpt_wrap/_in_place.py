"""Checkpoint and offload in place: the module object stays, its class changes.

The class becomes a subclass made for it, one per class, whose `forward` runs through a checkpoint,
an offload, or both. The subclass has the name of its base, because other code reads class names:
configuration files, printed models, lists of layer types.

- The options are one frozen value in the instance, `_ckpt_wrap`, so copies share nothing mutable.
- Offload is around checkpoint, in either order of the calls. Activations are recomputed, so only
  the inputs can be offloaded.
- `unwrap` restores the class. If another class was added on top since, as by `fully_shard` and
  `parametrize`, the subclass stays below it and does nothing.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ckpt_wrap._checkpoint import Checkpoint
from ckpt_wrap._checkpoint_fn import make_checkpoint_fn
from ckpt_wrap._errors import ModuleError, describe, has_forward, require_module
from ckpt_wrap._offload import Offload
from ckpt_wrap._offloaded_storage import OffloadStats
from ckpt_wrap._options import CheckpointOptions, OffloadOptions, in_place_with
from ckpt_wrap._torch_compat import edges, is_parametrized_class, is_sharded
from ckpt_wrap._wrapper import ActivationWrapper, Behaviour, clean_in_place, innermost, is_wrapper

M = TypeVar("M", bound=nn.Module)
STATE = "_ckpt_wrap"


@in_place_with(CheckpointOptions)
def checkpoint_(module: M, *args: Any, **options: Any) -> M:
    """Checkpoint a module in place: backward recomputes what its forward would have saved.

    The module stays the same object with the same names and the same `isinstance`. Its class
    becomes a subclass with the same name, so `type(module)` is another class until `unwrap`. A
    second call replaces the options of the first.

    Recomputation sees arguments, attributes, buffers, hooks and random numbers as forward found
    them, and leaves them unchanged. Everything else is changed twice, such as global variables,
    files and objects in attributes: guard these writes with `is_recomputing`. Do not write to
    parameters, or to tensors among the arguments, between forward and backward.

    Args:
        module: the module to change. A model that is to be compiled or parametrized is changed
            first.
        checkpoint_impl: accepted as in torch; both values run the same implementation.
        checkpoint_fn: a checkpoint function, called as `checkpoint_fn(function, *args, **kwargs)`.
            None: this package's own.
        use_reentrant: as `checkpoint_impl`; a `checkpoint_fn` receives it.
        preserve_rng_state: restore random states in recomputation: those of torch, for the CPU and
            each device of an input, of Python, of NumPy, and of generators in arguments and
            attributes. False is right only for a forward that draws no random numbers.
        context_fn: returns two context managers, for forward and for recomputation. Recomputation
            may leave the second one early, by an exception.
        determinism_check: "default" compares shape, dtype, device and kind of autograd node of each
            recomputed tensor with the one it replaces; "none" does not, so a forward that differs
            gives wrong gradients without an error.
        early_stop: end recomputation at the last tensor that backward needs. Code after it, and
            forward hooks of the last layers, then run once.
        debug: only with `checkpoint_fn=torch.utils.checkpoint.checkpoint, use_reentrant=False`,
            which prints the operators of both runs if they differ.
        **checkpoint_fn_options: further options of `checkpoint_fn`. It also receives those of the
            options above that differ from their default.

    Returns:
        The module itself.

    Raises:
        ModuleError: not an `nn.Module`, one without a forward, such as `nn.ModuleList`, or one
            whose class cannot be changed. In forward: a layer below is lazy and has no parameters.
        OptionError: an option has a wrong value, or needs a `checkpoint_fn`.
        RecomputeError: in backward: recomputation saved other tensors than forward, or a parameter
            or an input was changed since.

    Warns:
        UserWarning: the module contains a list of repeated blocks, which become one region, or
            has checkpointing of its own switched on.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> checkpoint_(model[0]) is model[0]
        True
        >>> model(torch.ones(1, 4)).sum().backward()
    """
    require_changeable(module, "checkpoint_")
    made = make_checkpoint_fn(CheckpointOptions("checkpoint_", *args, **options))
    warn_of_one_region(module)
    warn_of_own_switch(module, "checkpoint_")
    return become(module, checkpoint=made)


@in_place_with(OffloadOptions)
def offload_(module: M, *args: Any, **options: Any) -> M:
    """Offload a module in place: tensors that its forward saves for backward move elsewhere.

    They are back when backward reads them. Each storage moves once, however many saved tensors
    share it; parameters and buffers never move. As with `checkpoint_`, only the class of the module
    changes, and a second call replaces the options of the first. A module that is also
    checkpointed offloads its inputs.

    A module that is compiled raises an error when it is called, because the compiler decides what
    to save. Under `torch.func`, in `torch.export` and inside a checkpointed module, which saves
    nothing, the module runs without offload.

    Args:
        module: the module to change.
        to: `"cpu"` for pinned host memory, or the path of an existing folder. Tensors of the CPU
            only move to a folder.
        min_bytes: tensors whose storage has fewer bytes stay where they are.
        max_bytes_away: how many bytes may be elsewhere at one time, over all modules with the same
            options in this process. Tensors beyond that stay where they are. None: no limit.

    Returns:
        The module itself.

    Raises:
        ModuleError: not an `nn.Module`, one without a forward, such as `nn.ModuleList`, or one
            whose class cannot be changed.
        OptionError: an option has a wrong value, or there is no such folder.
        OffloadError: the folder cannot be written to. In forward: the disk is full, or the module
            is compiled or captured in a graph. In backward: a saved tensor was changed in place.

    Warns:
        UserWarning: `to` is host memory and there is no accelerator, so nothing moves.

    Example:
        >>> import tempfile, torch
        >>> block = offload_(nn.Linear(4, 4), to=tempfile.gettempdir())
        >>> block(torch.ones(1, 4)).sum().backward()
    """
    require_changeable(module, "offload_")
    return become(module, offload=Offload(OffloadOptions("offload_", *args, **options)))


def offload_stats(module: nn.Module) -> OffloadStats:
    """Return the counts of all offloaded modules at and below a module, added up.

    `peak_bytes_away` of several modules is an upper bound: their peaks need not coincide.

    Args:
        module: the module; its submodules are included.

    Returns:
        A snapshot. It is all zeros if no module is offloaded, or if nothing was called yet.

    Raises:
        ModuleError: not an `nn.Module`.

    Example:
        >>> offload_stats(nn.Linear(2, 2)).copies_out
        0
    """
    require_module(module, "offload_stats")
    callers = [caller for each in module.modules() for caller in _callers_of(each)]
    found = [caller.stats for caller in callers if isinstance(caller, Offload)]
    return OffloadStats(*map(sum, zip(*map(astuple, [OffloadStats(), *found]), strict=True)))


def unwrap(module: nn.Module) -> nn.Module:
    """Undo `checkpoint_`, `offload_` and the wrappers, this package's and torch's own.

    Hooks that were registered on a wrapper are lost with it. A backward of an earlier forward still
    recomputes.

    Args:
        module: the module to change, in place, with all modules below it.

    Returns:
        The module itself, or the wrapped module if `module` is a wrapper.

    Raises:
        ModuleError: not an `nn.Module`, or a wrapper that FSDP2 has sharded; nothing is changed.

    Example:
        >>> linear = nn.Linear(4, 4)
        >>> unwrap(checkpoint_(linear)) is linear and type(linear) is nn.Linear
        True
    """
    require_module(module, "unwrap")
    for name, wrapper in module.named_modules():
        if is_wrapper(wrapper) and is_sharded(wrapper):
            raise ModuleError(
                f"ckpt_wrap.unwrap: module {describe(wrapper, name)} is sharded, but unwrapping "
                "would also remove what gathers its parameters. Unwrap before fully_shard, or use "
                "checkpoint_."
            )
    module = innermost(module)
    _restore(module)
    for parent in [m for m in module.modules() if not is_wrapper(m)]:
        for name, child in list(edges(parent)):
            if is_wrapper(child):
                setattr(parent, name, innermost(child))
            _restore(innermost(child))
    return module


def become(module: M, **change: Any) -> M:
    """Change a module in place; `change` gives new values for fields of its `Behaviour`."""
    # Not by getattr: a module may look up missing attributes in other objects.
    wanted = replace(vars(module).get(STATE) or Behaviour(), **change)
    _set_class(module, _changed_class(type(module)))
    vars(module)[STATE] = wanted
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, OwnForward):
        vars(module)["forward"] = OwnForward(module, own)
    return module


class OwnForward:
    """A `forward` that is set on the instance, for example by accelerate's hooks.

    Python finds it before the class's `forward`, so it has to go through the behaviour itself.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module = module
        self.function = function
        self.__wrapped__ = function  # for `inspect.signature`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward through the behaviour of its module."""
        behaviour = vars(self.module).get(STATE)
        if behaviour is None or not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        return behaviour(types.MethodType(_call_own, self.module), *args, **kwargs)


def _call_own(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return vars(module)["forward"].function(*args, **kwargs)


def set_name(module: nn.Module, name: str) -> None:
    """Set the name of a module for messages."""
    for caller in _callers_of(module):
        if isinstance(caller, (Checkpoint, Offload)):
            caller.name = name


def _callers_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Return checkpoint functions and offloads of one module, changed in place or a wrapper."""
    done = vars(module).get(STATE) or Behaviour()
    yield from (caller for caller in (done.checkpoint, done.offload) if caller is not None)
    if isinstance(module, ActivationWrapper):
        yield module._caller


def _restore(module: nn.Module) -> None:
    vars(module).pop(STATE, None)
    own = vars(module).get("forward")
    if isinstance(own, OwnForward):
        vars(module)["forward"] = own.function
    if STATE in vars(type(module)):
        _set_class(module, type(module).__bases__[0])


_CLASS: Any = vars(object)["__class__"]


def _set_class(module: object, kind: Any) -> None:
    """Set the class of a module without calling its `__setattr__`."""
    _CLASS.__set__(module, kind)


def _changed_class(kind: Any) -> Any:
    """Return the class for a changed module of this class; the same if it has it already."""
    return kind if hasattr(kind, STATE) else _subclass_of(kind)


@functools.cache
def _subclass_of(base: Any) -> Any:
    """Return the subclass of the module class `base`, one per base."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._ckpt_wrap is None:
            return super(made, self).forward(*args, **kwargs)
        return self._ckpt_wrap(super(made, self).forward, *args, **kwargs)

    def load(self: Any, state_dict: dict[str, Any], *rest: Any) -> None:
        clean_in_place(state_dict)
        base._load_from_state_dict(self, state_dict, *rest)

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        make, args, *rest = base.__reduce_ex__(self, protocol)
        plain = tuple(base if arg is made else arg for arg in args)
        return (_rebuild, (make, plain), *rest)

    made: Any = type(
        base.__name__,
        (base,),
        {
            "__doc__": base.__doc__,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__reduce_ex__": reduce_ex,
            STATE: None,
            "_load_from_state_dict": load,
            "forward": forward,
        },
    )
    return made


def _rebuild(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """Make an empty instance for pickle and copy, and change its class."""
    module = make(*args)
    _set_class(module, _changed_class(type(module)))
    return module


def require_changeable(module: nn.Module, function: str, name: str = "") -> None:
    """Raise `ModuleError` unless `module` has a forward and a class that can be changed."""
    require_module(module, function)
    reason = _why_not(module)
    if reason:
        raise ModuleError(f"ckpt_wrap.{function}: module {describe(module, name)} {reason}")


def _why_not(module: nn.Module) -> str:
    if "_orig_mod" in module._modules:
        return (
            "is compiled, but it is the module inside that must be changed. "
            "Call this before torch.compile, or on its _orig_mod."
        )
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "is a TorchScript module, but its class cannot be changed. Use checkpoint_wrapper or "
            "offload_wrapper, for the blocks of a model with apply_activation_checkpointing."
        )
    if not has_forward(module):
        return (
            "has no forward, but only a module that is called can be checkpointed or offloaded. "
            "Wrap its items instead, one by one."
        )
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return (
            "is lazy, but it must have its parameters, as it changes its class when it gets "
            "them. Run one forward first."
        )
    if is_parametrized_class(type(module)) and not hasattr(type(module), STATE):
        return (
            "is parametrized, but removing its parametrization would then take the wrong class "
            "away. Call this before torch.nn.utils.parametrize, or on the module that contains it."
        )
    try:
        _changed_class(type(module))
    except Exception as error:  # raised by its metaclass or __init_subclass__
        return (
            f"cannot be subclassed ({error}), but a subclass of its class is made for it. "
            "Use checkpoint_wrapper or offload_wrapper."
        )
    return ""


# Attributes by which transformers, diffusers, timm and others enable checkpointing.
_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")


def warn_of_own_switch(module: nn.Module, function: str) -> None:
    """Warn if a module's own checkpointing is enabled, since it would recompute twice."""
    for name, below in module.named_modules():
        switch = next((s for s in _SWITCHES if vars(below).get(s) is True), None)
        if switch is not None:
            warnings.warn(
                f"ckpt_wrap.{function}: module {describe(below, name)} has checkpointing of its "
                f"own switched on ({switch}=True), so it recomputes twice. Switch it off, for "
                "example by model.gradient_checkpointing_disable().",
                stacklevel=3,
            )
            return


def warn_of_one_region(module: nn.Module) -> None:
    """Warn if a module with a list of repeated blocks becomes one region.

    A list itself, or one of two blocks, may be a segment on purpose. Blocks that are checkpointed
    themselves are fine: recomputation of the module saves only their inputs.
    """
    for name, below in module.named_modules():
        if below is module or not isinstance(below, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(block) for block in below if _is_plain_block(block)]
        repeated = next((kind for kind in kinds if kinds.count(kind) > 2), None)
        if repeated is not None and "expert" not in name:
            warnings.warn(
                f"ckpt_wrap.checkpoint_: module {describe(module)} contains "
                f"{kinds.count(repeated)} {repeated.__name__} in {name!r} and becomes one region. "
                "Recomputation then holds the tensors of all of them at once, and the peak is not "
                "lower. Checkpoint the blocks: ckpt_wrap.checkpoint_layers_(model).",
                stacklevel=3,
            )
            return


def _is_plain_block(module: nn.Module) -> bool:
    """Whether a module has a forward and submodules, and is not checkpointed itself."""
    if not has_forward(module) or not any(True for _ in module.children()):
        return False
    return STATE not in vars(module) and not is_wrapper(module)
