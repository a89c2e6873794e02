"""The in-place layer, a module that keeps its identity and changes its class.

The class becomes a subclass made for it, see `_subclass`, whose `forward` goes through a
checkpoint, an offload, or both.

Rule 1. All state is one frozen value in the instance, `_ckpt_wrap`. Copies share nothing that
        changes.
Rule 2. Offload goes around checkpoint, whichever was asked for first. What is recomputed is not
        kept, so what is left to offload are the inputs.
Rule 3. `unwrap` gives the class back. Where another class was put on top in the meantime, as
        `fully_shard` does, the subclass stays below it and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import nn

from ckpt_wrap._errors import ModuleError
from ckpt_wrap._torch_compat import edges, is_sharded, never_compiled
from ckpt_wrap._where import describe
from ckpt_wrap.checkpointing._checkpoint import Checkpoint
from ckpt_wrap.checkpointing._checkpoint_fn import CheckpointFn, checkpoint_fn_from
from ckpt_wrap.checkpointing._options import CheckpointImpl, require_module
from ckpt_wrap.modules._inner_state import innermost, is_wrapper
from ckpt_wrap.modules._subclass import (
    STATE,
    changed_class,
    plain_class,
    require_changeable,
    set_class,
)
from ckpt_wrap.modules._wrapper import ActivationWrapper
from ckpt_wrap.offload._offload import Offload
from ckpt_wrap.offload._offload_options import offload_options

M = TypeVar("M", bound=nn.Module)
Action = Literal["checkpoint", "offload"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What calls a module's forward."""

    checkpoint: CheckpointFn | None = None
    offload: Offload | None = None

    @never_compiled
    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward by way of them, see Rule 2."""
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
        checkpoint_fn: a checkpoint function, called as `checkpoint_fn(function, *args, **kwargs)`;
            None for this package's own.
        **options: options of that function. This package's own has `preserve_rng_state`,
            `context_fn`, `determinism_check`, `debug`, `early_stop` and `use_reentrant`, with
            the meaning they have in `torch.utils.checkpoint.checkpoint`. `use_reentrant=True`
            is the same as `checkpoint_impl=CheckpointImpl.REENTRANT`.

    Returns:
        The module.

    Raises:
        ModuleError: not an `nn.Module`, one without a forward, such as `nn.ModuleList`, or one
            whose class cannot be changed.
        OptionError: an option this package's own function does not have or cannot follow.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> checkpoint_(model[0]) is model[0]
        True
        >>> model(torch.ones(1, 4)).sum().backward()
    """
    require_changeable(module, "checkpoint_")
    options.update(checkpoint_impl=checkpoint_impl, checkpoint_fn=checkpoint_fn)
    return become(module, planned(module, "checkpoint", options))


def offload_(module: M, **options: Any) -> M:
    """Offload a module in place: what its forward saves for backward is kept elsewhere.

    Under `torch.compile` and `torch.export` the module runs as it is: the compiler decides what to
    keep, and where. It also does so under `torch.func`, and inside a checkpointed module, which
    keeps nothing.

    Args:
        module: the module to change.
        **options: the fields of `OffloadOptions`: `to`, `create`, `min_bytes`,
            `keep_last`, `max_inflight_bytes`, `max_bytes_away`.

    Returns:
        The module.

    Raises:
        ModuleError: not an `nn.Module`, one without a forward, such as `nn.ModuleList`, or one
            whose class cannot be changed.
        OptionError: an unknown option, or a value that cannot work.

    Example:
        >>> import torch
        >>> block = offload_(nn.Linear(4, 4))
        >>> block(torch.ones(1, 4)).sum().backward()
    """
    require_changeable(module, "offload_")
    return become(module, planned(module, "offload", options))


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
    """What was done to a module in place, if anything."""
    # Not by getattr: a module may look in others for the attributes it does not have.
    done: Behaviour | None = vars(module).get(STATE)
    return done


def planned(module: nn.Module, action: Action, options: Mapping[str, Any]) -> Behaviour:
    """What a module will do once it is changed; all that can raise is raised here.

    Raises:
        OptionError: an unknown option, or a value that cannot work.
        OffloadError: the folder cannot be made or written to.
    """
    before = behaviour(module) or Behaviour()
    if action == "offload":
        return replace(before, offload=Offload(offload_options(options)))
    return replace(before, checkpoint=checkpoint_fn_from(options))


def become(module: M, wanted: Behaviour) -> M:
    """Have a module do what was planned."""
    set_class(module, changed_class(type(module)))
    vars(module)[STATE] = wanted
    return module


def put_back(module: nn.Module, kind: type[nn.Module], before: Behaviour | None) -> None:
    """Give a module the class and the behaviour it had."""
    set_class(module, kind)
    vars(module).pop(STATE, None)
    if before is not None:
        vars(module)[STATE] = before


def callers_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """What calls the forward of one module, changed in place or a wrapper, not of those below."""
    done = behaviour(module) or Behaviour()
    yield from (caller for caller in (done.checkpoint, done.offload) if caller is not None)
    if isinstance(module, ActivationWrapper):
        yield from module._callers()


def tell_name(module: nn.Module, name: str) -> None:
    """Have what calls a module's forward name it in their messages."""
    for caller in callers_of(module):
        if isinstance(caller, (Checkpoint, Offload)):
            caller.name = name


def _restore(module: nn.Module) -> None:
    vars(module).pop(STATE, None)
    set_class(module, plain_class(type(module)))
