"""Edge: the in-place layer, a module that keeps its identity and changes its class.

The class becomes a subclass made for it, whose `forward` goes through an engine. The subclass
has the name of its base, because class names are data to others: configuration files, printed
models, lists of layer types.

Rule 1. All state is one frozen value in the instance, `_ckpt_wrap`. Copies share nothing that
        changes.
Rule 2. Offload goes around checkpoint, whichever was asked for first. What is recomputed is not
        kept, so what is left to offload are the inputs.
Rule 3. `unwrap` gives the class back. Where another class was put on top in the meantime, as
        `fully_shard` and `parametrize` do, the subclass stays below it and does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ckpt_wrap._engine import Engine, make_engine
from ckpt_wrap._errors import ModuleError
from ckpt_wrap._names import clean_in_place
from ckpt_wrap._offload import Offload
from ckpt_wrap._offload_options import offload_options
from ckpt_wrap._options import CheckpointImpl, require_module
from ckpt_wrap._torch_compat import edges
from ckpt_wrap._wrapper import innermost, is_wrapper

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The engines a module's forward goes through."""

    checkpoint: Engine | None = None
    offload: Offload | None = None

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward by way of the engines, see Rule 2."""
        if self.offload is None:
            return self.checkpoint(forward, *args, **kwargs)  # type: ignore[misc]  # one is set
        if self.checkpoint is None:
            return self.offload(forward, *args, **kwargs)
        return self.offload(self.checkpoint, forward, *args, **kwargs)


def checkpoint_(
    module: M,
    *,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> M:
    """Checkpoint a module in place: backward recomputes what its forward would have saved.

    The module stays the same object with the same names and the same `isinstance`. Called again,
    it takes the new options.

    Args:
        module: the module to change.
        checkpoint_impl: what recomputes, unless `checkpoint_fn` is given.
        checkpoint_fn: a recompute engine, called as `checkpoint_fn(function, *args, **kwargs)`;
            None for this package's own.
        **options: options of the engine. This package's own has `preserve_rng_state`,
            `context_fn`, `determinism_check`, `debug` and `early_stop`, with the meaning they
            have in `torch.utils.checkpoint.checkpoint`.

    Returns:
        The module.

    Raises:
        ModuleError: not an `nn.Module`, or one whose class cannot be changed.
        OptionError: an option this package's own engine does not have or cannot follow.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> checkpoint_(model[0]) is model[0]
        True
        >>> model(torch.ones(1, 4)).sum().backward()
    """
    require_changeable(module, "checkpoint_")
    engine = make_engine(checkpoint_impl, checkpoint_fn, options)
    return _become(module, replace(_behaviour(module), checkpoint=engine))


def offload_(module: M, **options: Any) -> M:
    """Offload a module in place: what its forward saves for backward is kept elsewhere.

    Under `torch.compile` and `torch.export` the module runs as it is: the compiler decides what
    it keeps, and where. So it does under `torch.func`, and inside a checkpointed module, which
    keeps nothing.

    Args:
        module: the module to change.
        **options: the fields of `OffloadOptions`: `to`, `min_bytes`, `keep_last`,
            `max_inflight_bytes`.

    Returns:
        The module.

    Raises:
        ModuleError: not an `nn.Module`, or one whose class cannot be changed.
        OptionError: an unknown option, or a value that cannot work.

    Example:
        >>> block = offload_(nn.Linear(4, 4))
        >>> block(torch.ones(1, 4)).sum().backward()
    """
    require_changeable(module, "offload_")
    engine = Offload(offload_options(options))
    return _become(module, replace(_behaviour(module), offload=engine))


def unwrap(module: nn.Module, *, recurse: bool = True) -> nn.Module:
    """Undo `checkpoint_`, `offload_` and the wrappers, this package's and torch's own.

    Args:
        module: the module to free, in place.
        recurse: whether to free the modules below it as well.

    Returns:
        The module, or the wrapped module where it is a wrapper.

    Raises:
        ModuleError: not an `nn.Module`.

    Example:
        >>> linear = nn.Linear(4, 4)
        >>> unwrap(checkpoint_(linear)) is linear and type(linear) is nn.Linear
        True
    """
    require_module(module, "unwrap")
    module = innermost(module)
    _restore(module)
    if recurse:
        for parent in [m for m in module.modules() if not is_wrapper(m)]:
            for name, child in list(edges(parent)):
                if is_wrapper(child):
                    setattr(parent, name, innermost(child))
                _restore(innermost(child))
    return module


def behaviour(module: nn.Module) -> Behaviour | None:
    """What was done to a module in place, if anything."""
    return getattr(module, "_ckpt_wrap", None)


def _behaviour(module: nn.Module) -> Behaviour:
    return behaviour(module) or Behaviour()


def _become(module: M, wanted: Behaviour) -> M:
    if not hasattr(type(module), "_ckpt_wrap"):
        base: Any = type(module)
        module.__class__ = subclass_of(base)
    module.__dict__["_ckpt_wrap"] = wanted
    return module


def _restore(module: nn.Module) -> None:
    module.__dict__.pop("_ckpt_wrap", None)
    if "_ckpt_wrap" in vars(type(module)):
        module.__class__ = type(module).__bases__[0]


@functools.cache
def subclass_of(base: Any) -> Any:
    """The class that instances of the module class `base` get, one per base."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._ckpt_wrap is None:
            return base.forward(self, *args, **kwargs)
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
            "_ckpt_wrap": None,
            "_load_from_state_dict": load,
            "forward": forward,
        },
    )
    return made


def rebuild(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """An instance for pickle and copy to fill: of the plain class, then changed."""
    module = make(*args)
    base: Any = type(module)
    module.__class__ = subclass_of(base)
    return module


def require_changeable(module: nn.Module, function: str) -> None:
    """Raise `ModuleError` unless `module` is one whose class can be changed."""
    require_module(module, function)
    reason = _why_not(module)
    if reason:
        raise ModuleError(f"ckpt_wrap.{function}: module of class {type(module).__name__} {reason}")


def _why_not(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted, but its class must be changeable. Wrap it before scripting."
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
    return ""
