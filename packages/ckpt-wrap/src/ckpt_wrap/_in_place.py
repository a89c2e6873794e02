"""The in-place layer, a module that keeps its identity and changes its class.

The class becomes a subclass made for it, one per class, whose `forward` goes through a checkpoint,
an offload, or both. The subclass has the name of its base, because class names are data to others:
configuration files, printed models, lists of layer types.

- The options are one frozen value in the instance, `_ckpt_wrap`, so copies share nothing mutable.
- Offload goes around checkpoint, whichever was asked for first. Activations are recomputed, so only
  the inputs can be offloaded.
- `unwrap` gives the class back. Where another class was put on top in the meantime, as
  `fully_shard` does, the subclass stays below it and does nothing.
- The class `parametrize` makes for a module stays the topmost, because removing a parametrization
  takes the topmost away.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap._checkpoint import Checkpoint
from ckpt_wrap._checkpoint_fn import CheckpointFn, make_checkpoint_fn
from ckpt_wrap._errors import (
    ModuleError,
    OptionError,
    describe,
    explain_arguments,
    has_forward,
    require_forward,
    require_module,
)
from ckpt_wrap._offload import Offload
from ckpt_wrap._offloaded_storage import OffloadStats
from ckpt_wrap._options import CheckpointImpl, ContextFn, OffloadOptions
from ckpt_wrap._torch_compat import edges, is_parametrized_class, is_sharded, never_compiled
from ckpt_wrap._wrapper import ActivationWrapper, clean_in_place, innermost, is_wrapper

M = TypeVar("M", bound=nn.Module)
Action = Literal["checkpoint", "offload"]
STATE = "_ckpt_wrap"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The checkpoint function and the offload that a module's forward goes through."""

    checkpoint: CheckpointFn | None = None
    offload: Offload | None = None

    @never_compiled
    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the forward through them."""
        if self.offload is None:
            return self.checkpoint(forward, *args, **kwargs)  # type: ignore[misc]  # one is set
        if self.checkpoint is None:
            return self.offload(forward, *args, **kwargs)
        return self.offload(self.checkpoint, forward, *args, **kwargs)


@explain_arguments
def checkpoint_(
    module: M,
    *,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: CheckpointFn | None = None,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **checkpoint_fn_options: Any,
) -> M:
    """Checkpoint a module in place: backward recomputes what its forward would have saved.

    The module stays the same object with the same names and the same `isinstance`. Called again,
    it takes the new options.

    Args:
        module: the module to change.
        checkpoint_impl: the implementation, unless `checkpoint_fn` is given.
        checkpoint_fn: a checkpoint function, called as `checkpoint_fn(function, *args, **kwargs)`.
            None: this package's own.
        use_reentrant: True is the same as `checkpoint_impl=CheckpointImpl.REENTRANT`.
        preserve_rng_state: replay random numbers in recomputation.
        context_fn: returns two context managers, for forward and for recomputation.
        determinism_check: "default" compares every recomputed tensor with the one it replaces;
            "none" does not.
        debug: on a mismatch, print the operators of forward and of recomputation.
        early_stop: end recomputation at the last tensor that backward needs.
        **checkpoint_fn_options: further options of `checkpoint_fn`. It also receives those of the
            options above that differ from their default.

    Returns:
        The module.

    Raises:
        ModuleError: not an `nn.Module`, one without a forward, such as `nn.ModuleList`, or one
            whose class cannot be changed.
        OptionError: an option is unknown, invalid or not passed by name, or two conflict.

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
    warn_of_one_region(module, "checkpoint_")
    warn_of_own_switch(module, "checkpoint_")
    made = make_checkpoint_fn(
        "checkpoint_",
        checkpoint_impl=checkpoint_impl,
        checkpoint_fn=checkpoint_fn,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        **checkpoint_fn_options,
    )
    return become(module, checkpoint=made)


@explain_arguments
def offload_(
    module: M,
    *,
    to: str | os.PathLike[str] = "cpu",
    create: bool = False,
    min_bytes: int = 1024,
    keep_last: int = 0,
    max_inflight_bytes: int | None = None,
    max_bytes_away: int | None = None,
) -> M:
    """Offload a module in place: what its forward saves for backward is kept elsewhere.

    Under `torch.compile` it is an error, because the compiler decides what to keep, and where.
    Under `torch.func`, in `torch.export` and inside a checkpointed module, which keeps nothing,
    the module runs as it is.

    Args:
        module: the module to change.
        to: `"cpu"` for host memory, or the path of a folder.
        create: create that folder, and its parents, if it does not exist.
        min_bytes: tensors with a smaller storage stay where they are.
        keep_last: how many of the latest calls keep their tensors; backward needs those first.
        max_inflight_bytes: how many bytes saved by one thread may wait on a device to be copied.
            None: what two calls save, and 1 GiB at most.
        max_bytes_away: how many bytes may be elsewhere at one time, over all modules with the same
            options in this process. Tensors beyond that stay where they are. None: no limit.

    Returns:
        The module.

    Raises:
        ModuleError: not an `nn.Module`, one without a forward, such as `nn.ModuleList`, or one
            whose class cannot be changed.
        OptionError: an option is unknown, invalid or not passed by name, or the folder does not
            exist and `create` is False.
        OffloadError: the folder cannot be created or written to.

    Example:
        >>> import torch
        >>> block = offload_(nn.Linear(4, 4))
        >>> block(torch.ones(1, 4)).sum().backward()
    """
    require_changeable(module, "offload_")
    options = OffloadOptions(
        to=to,
        create=create,
        min_bytes=min_bytes,
        keep_last=keep_last,
        max_inflight_bytes=max_inflight_bytes,
        max_bytes_away=max_bytes_away,
    )
    return become(module, offload=Offload(options))


def offload_stats(module: nn.Module) -> OffloadStats:
    """Counts of all offloaded modules at and below a module, added up.

    So `peak_bytes_away` of several modules is an upper bound: their peaks need not coincide.

    Raises:
        ModuleError: not an `nn.Module`.

    Example:
        >>> offload_stats(nn.Linear(2, 2)).copies_out
        0
    """
    require_module(module, "offload_stats")
    callers = [caller for each in module.modules() for caller in callers_of(each)]
    found = [caller.stats for caller in callers if isinstance(caller, Offload)]
    return OffloadStats(*map(sum, zip(*map(astuple, [OffloadStats(), *found]), strict=True)))


def unwrap(module: nn.Module, *, recurse: bool = True) -> nn.Module:
    """Undo `checkpoint_`, `offload_` and the wrappers, this package's and torch's own.

    Args:
        module: the module to free, in place.
        recurse: whether to free the modules below it as well.

    Returns:
        The module, or the wrapped module if it is a wrapper.

    Raises:
        ModuleError: not an `nn.Module`, or a wrapper that FSDP2 has sharded; nothing is changed.

    Example:
        >>> linear = nn.Linear(4, 4)
        >>> unwrap(checkpoint_(linear)) is linear and type(linear) is nn.Linear
        True
    """
    require_module(module, "unwrap")
    for name, wrapper in module.named_modules() if recurse else [("", module)]:
        _require_removable(wrapper, name)
    module = innermost(module)
    _restore(module)
    if recurse:
        for parent in [m for m in module.modules() if not is_wrapper(m)]:
            for name, child in list(edges(parent)):
                if is_wrapper(child):
                    setattr(parent, name, innermost(child))
                _restore(innermost(child))
    return module


def _require_removable(module: nn.Module, name: str) -> None:
    if is_wrapper(module) and is_sharded(module):
        raise ModuleError(
            f"ckpt_wrap.unwrap: module {describe(module, name)} is sharded, but unwrapping would "
            "also remove what gathers its parameters. Unwrap before fully_shard, or use "
            "checkpoint_."
        )


def behaviour(module: nn.Module) -> Behaviour | None:
    """The change in place of a module, or None."""
    # Not by getattr: a module may look in others for the attributes it does not have.
    done: Behaviour | None = vars(module).get(STATE)
    return done


def planned(
    action: Action, options: Mapping[str, Any], *, check_only: bool = False
) -> dict[str, Any]:
    """The fields of `Behaviour` that an action sets; everything that can raise is raised here.

    Raises:
        OptionError: an unknown option, or a value that cannot work.
        OffloadError: the folder cannot be made or written to; not with `check_only`.
    """
    if action == "checkpoint":
        return {"checkpoint": make_checkpoint_fn("checkpoint_", **options)}
    try:
        checked = OffloadOptions(**options)
    except TypeError as error:  # an unknown name
        raise OptionError(f"ckpt_wrap.offload_: {error}. Pass options of offload_.") from None
    return {} if check_only else {"offload": Offload(checked)}


def become(module: M, **change: Any) -> M:
    """Change a module in place, by fields of `Behaviour`."""
    wanted = replace(behaviour(module) or Behaviour(), **change)
    set_class(module, changed_class(type(module)))
    vars(module)[STATE] = wanted
    return module


def put_back(module: nn.Module, kind: type[nn.Module], before: Behaviour | None) -> None:
    """Restore the class and the change of a module."""
    set_class(module, kind)
    vars(module).pop(STATE, None)
    if before is not None:
        vars(module)[STATE] = before


def callers_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Checkpoint functions and offloads of one module, changed in place or a wrapper."""
    done = behaviour(module) or Behaviour()
    yield from (caller for caller in (done.checkpoint, done.offload) if caller is not None)
    if isinstance(module, ActivationWrapper):
        yield from module._callers()


def set_name(module: nn.Module, name: str) -> None:
    """Set the name that messages about a module use."""
    for caller in callers_of(module):
        if isinstance(caller, (Checkpoint, Offload)):
            caller.name = name


def _restore(module: nn.Module) -> None:
    vars(module).pop(STATE, None)
    set_class(module, plain_class(type(module)))


_CLASS: Any = vars(object)["__class__"]


def set_class(module: object, kind: Any) -> None:
    """Change the class of a module, past its own `__setattr__`."""
    _CLASS.__set__(module, kind)


def changed_class(kind: Any) -> Any:
    """The class a module of this class gets; the same where it has it already."""
    if hasattr(kind, STATE):
        return kind
    if is_parametrized_class(kind):
        return over(kind, subclass_of(kind.__bases__[0]))
    return subclass_of(kind)


def plain_class(kind: Any) -> Any:
    """The class a module had before; the same where yet another class was put on top."""
    if STATE in vars(kind):
        return kind.__bases__[0]
    if is_parametrized_class(kind) and STATE in vars(kind.__bases__[0]):
        return over(kind, kind.__bases__[0].__bases__[0])
    return kind


def over(kind: Any, base: Any) -> Any:
    """A class that adds to `base` what `kind` adds to its own base."""
    own = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (base,), own)


@functools.cache
def subclass_of(base: Any) -> Any:
    """The class that instances of the module class `base` get, one per base."""

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
        return (rebuild, (make, plain), *rest)

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


def rebuild(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """An instance for pickle and copy to fill: of the plain class, then changed."""
    module = make(*args)
    set_class(module, changed_class(type(module)))
    return module


def require_changeable(module: nn.Module, function: str, name: str = "") -> None:
    """Raise `ModuleError` unless `module` has a forward and a class that can be changed."""
    require_module(module, function)
    reason = _why_not(module)
    if reason:
        raise ModuleError(f"ckpt_wrap.{function}: module {describe(module, name)} {reason}")
    require_forward(module, function, name)


def _why_not(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted, but its class must be changeable. Wrap it before scripting."
    if "_orig_mod" in module._modules:
        return (
            "is compiled, but it is the module inside that must be changed. "
            "Call this before torch.compile, or on its _orig_mod."
        )
    if "forward" in module.__dict__:
        return (
            "has a 'forward' of its own, but forward must come from its class. "
            "Call this before setting forward on the instance."
        )
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return (
            "is lazy, but it must have its parameters, as it changes its class when it gets "
            "them. Run one forward first."
        )
    try:
        changed_class(type(module))
    except Exception as error:  # raised by its metaclass or __init_subclass__
        return (
            f"cannot be subclassed ({error}), but a subclass of its class is made for it. "
            "Use checkpoint_wrapper or offload_wrapper."
        )
    return ""


# Attributes by which transformers, diffusers, timm and others switch checkpointing on.
_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")


def warn_of_own_switch(module: nn.Module, function: str) -> None:
    """Warn if a module has switched its own checkpointing on.

    Warns:
        UserWarning: it would recompute twice.
    """
    for name, below in module.named_modules():
        switch = next((s for s in _SWITCHES if vars(below).get(s) is True), None)
        if switch is not None:
            warnings.warn(
                f"ckpt_wrap.{function}: module {describe(below, name)} has checkpointing of its "
                f"own switched on ({switch}=True), so it recomputes twice. Switch it off, for "
                "example by model.gradient_checkpointing_disable().",
                stacklevel=4,
            )
            return


def warn_of_one_region(module: nn.Module, function: str) -> None:
    """Warn if a module contains a list of repeated blocks, and becomes one region.

    A list itself, or one of two blocks, may be a segment on purpose. Blocks that are checkpointed
    themselves are fine: recomputation of the module saves only their inputs.

    Warns:
        UserWarning: recomputation holds the tensors of all blocks at once.
    """
    for name, below in module.named_modules():
        if below is module or not isinstance(below, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(block) for block in below if _is_plain_block(block)]
        repeated = next((kind for kind in kinds if kinds.count(kind) > 2), None)
        if repeated is not None and "expert" not in name:
            warnings.warn(
                f"ckpt_wrap.{function}: module {describe(module, '')} contains "
                f"{kinds.count(repeated)} {repeated.__name__} in {name!r} and becomes one region. "
                "Recomputation then holds the tensors of all of them at once, and the peak is not "
                "lower. Checkpoint the blocks: ckpt_wrap.checkpoint_layers_(model).",
                stacklevel=4,
            )
            return


def _is_plain_block(module: nn.Module) -> bool:
    """Whether a module has a forward and submodules, and is not checkpointed itself."""
    if not has_forward(module) or not any(True for _ in module.children()):
        return False
    return STATE not in vars(module) and not is_wrapper(module)
