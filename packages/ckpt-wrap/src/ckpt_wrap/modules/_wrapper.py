"""The drop-in layer, a module that holds the wrapped module and acts like it.

Rule 1. Names. The wrapper adds nothing to the names of parameters, buffers, modules and
        state-dict entries; only attribute paths and `named_children` show the inner module.
Rule 2. Attributes. What the wrapper's class or instance does not define is the inner module's:
        reading, setting, deleting, indexing, iterating and registering all go there.
Rule 3. Loading. A state dict loads whether or not its keys carry the prefix.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap.checkpointing._checkpoint import Checkpoint
from ckpt_wrap.checkpointing._checkpoint_fn import CheckpointFn, make_checkpoint_fn
from ckpt_wrap.checkpointing._options import CheckpointImpl, ContextFn, require_module
from ckpt_wrap.modules._inner_state import (
    ClassOfInner,
    InnerDict,
    after_load,
    asked_by_parametrize,
    before_load,
    innermost,
)
from ckpt_wrap.modules._names import WRAPPED_MODULE, clean_state_dict
from ckpt_wrap.modules._subclass import set_class
from ckpt_wrap.offload._offload import Offload
from ckpt_wrap.offload._offload_options import offload_options


class ActivationWrapper(ClassOfInner, nn.Module, ABC):
    """Base of the two wrappers; holds the wrapped module as `_checkpoint_wrapped_module`.

    Raises:
        ModuleError: `mod` is not an `nn.Module`.
    """

    def __init__(self, mod: nn.Module) -> None:
        require_module(mod, type(self).__name__)
        super().__init__()
        super().__setattr__(WRAPPED_MODULE, mod)
        self.__dict__["_parameters"] = InnerDict(mod._parameters)
        self.__dict__["_buffers"] = InnerDict(mod._buffers)
        self.__dict__["_non_persistent_buffers_set"] = mod._non_persistent_buffers_set
        # The handles are kept because they keep their numbers from being given again after pickle.
        self.__dict__["_handles"] = (
            super().register_load_state_dict_pre_hook(before_load),
            super().register_load_state_dict_post_hook(after_load),
        )

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""

    def _callers(self) -> list[Callable[..., Any]]:
        """What calls its forward, or what it wraps."""
        return []

    # Rule 1

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, then the inner module and all below it, under the same name."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._inner().named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's state dict, entry for entry and version for version."""
        return self._inner().state_dict(*args, **kwargs)

    def register_state_dict_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Register the hook on the inner module, whose state dict is the wrapper's."""
        return self._inner().register_state_dict_pre_hook(hook)

    def register_state_dict_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Register the hook on the inner module, whose state dict is the wrapper's."""
        return self._inner().register_state_dict_post_hook(hook)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook that sees the names as they are without the wrapper."""
        handle = super().register_load_state_dict_pre_hook(hook)
        hooks, own = self._load_state_dict_pre_hooks, self._handles[0].id
        hooks[own] = hooks.pop(own)  # to the end: it adds the wrapper to the names
        return handle

    # Rule 2

    def _inner(self) -> nn.Module:
        inner: nn.Module = self._modules[WRAPPED_MODULE]  # type: ignore[assignment]  # never None
        return inner

    def _owns(self, name: str) -> bool:
        own = self.__dict__
        return name in own or name == WRAPPED_MODULE or hasattr(type(self), name)

    def __getattr__(self, name: str) -> Any:
        # An instance made by __new__ alone has no _modules yet; looking for one must not recurse.
        modules = self.__dict__.get("_modules", {})
        # Nor are methods such as __deepcopy__ the wrapper's: they would copy the inner module.
        special = name.startswith("__") and name.endswith("__")
        if special or WRAPPED_MODULE not in modules:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        inner = modules[WRAPPED_MODULE]
        return inner if name == WRAPPED_MODULE else getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and asked_by_parametrize():
            set_class(innermost(self), value)
        elif WRAPPED_MODULE not in self.__dict__.get("_modules", {}) or self._owns(name):
            super().__setattr__(name, value)
        else:
            setattr(self._inner(), name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            super().__delattr__(name)
        else:
            delattr(self._inner(), name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add the module to the inner module."""
        self._inner().add_module(name, module)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._inner())})

    def __bool__(self) -> bool:
        return bool(self._inner())

    def __len__(self) -> int:
        return len(self._container())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._container())

    def __contains__(self, item: object) -> bool:
        return item in self._container()

    def __getitem__(self, key: Any) -> Any:
        return self._container()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._container()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._container()[key]

    def _container(self) -> Any:
        return self._inner()

    # Rule 3

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the inner module a state dict with or without the prefix."""
        return super().load_state_dict(clean_state_dict(state_dict), strict=strict, assign=assign)


class CheckpointWrapper(ActivationWrapper):
    """A module whose forward is checkpointed; made by `checkpoint_wrapper`, with its options."""

    checkpoint_impl: CheckpointImpl
    checkpoint_fn: CheckpointFn

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: CheckpointFn | None = None,
        *,
        use_reentrant: bool | None = None,
        preserve_rng_state: bool = True,
        context_fn: ContextFn = noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        **checkpoint_fn_options: Any,
    ) -> None:
        super().__init__(mod)
        made = make_checkpoint_fn(
            "checkpoint_wrapper",
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
        # Straight into the instance: by Rule 2 a new name would go to the inner module.
        impl = made.options.impl if isinstance(made, Checkpoint) else checkpoint_impl
        self.__dict__["checkpoint_impl"] = impl
        self.__dict__["checkpoint_fn"] = made

    def _callers(self) -> list[Callable[..., Any]]:
        """What calls its forward, or what it wraps."""
        return [self.checkpoint_fn]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, checkpointed."""
        inner: Any = self._modules[WRAPPED_MODULE]
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if isinstance(inner, OffloadWrapper):
            # What is recomputed is not kept, so what is left to offload are the inputs.
            return inner._offload(self.checkpoint_fn, inner._inner(), *args, **kwargs)
        return self.checkpoint_fn(inner, *args, **kwargs)


class OffloadWrapper(ActivationWrapper):
    """A module whose saved tensors are offloaded; made by `offload_wrapper`, with its options."""

    _offload: Offload

    def __init__(
        self,
        mod: nn.Module,
        *,
        to: str | os.PathLike[str] = "cpu",
        create: bool = False,
        min_bytes: int = 1024,
        keep_last: int = 0,
        max_inflight_bytes: int | None = None,
        max_bytes_away: int | None = None,
    ) -> None:
        super().__init__(mod)
        options = offload_options(
            to=to,
            create=create,
            min_bytes=min_bytes,
            keep_last=keep_last,
            max_inflight_bytes=max_inflight_bytes,
            max_bytes_away=max_bytes_away,
        )
        self.__dict__["_offload"] = Offload(options)

    def _callers(self) -> list[Callable[..., Any]]:
        """What calls its forward, or what it wraps."""
        return [self._offload]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, offloading what it saves."""
        return self._offload(self._inner(), *args, **kwargs)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: CheckpointFn | None = None,
    *,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **checkpoint_fn_options: Any,
) -> nn.Module:
    """Wrap a module so that backward recomputes what its forward would have saved.

    Args:
        module: the module to wrap; it becomes `_checkpoint_wrapped_module` of the result.
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

    Raises:
        ModuleError: `module` is not an `nn.Module`.
        OptionError: an option is unknown or invalid, or two options conflict.

    Example:
        >>> import torch
        >>> block = checkpoint_wrapper(torch.nn.Linear(4, 2))
        >>> list(block.state_dict())
        ['weight', 'bias']
    """
    return CheckpointWrapper(
        module,
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


def offload_wrapper(
    module: nn.Module,
    *,
    to: str | os.PathLike[str] = "cpu",
    create: bool = False,
    min_bytes: int = 1024,
    keep_last: int = 0,
    max_inflight_bytes: int | None = None,
    max_bytes_away: int | None = None,
) -> nn.Module:
    """Wrap a module so that the tensors it saves for backward are kept elsewhere.

    Under `torch.compile` and `torch.export` the module runs as it is: the compiler decides what
    it keeps, and where.

    Args:
        module: the module to wrap.
        to: see `offload_`, as for the other options.
        create: create the folder if it does not exist.
        min_bytes: tensors with a smaller storage stay where they are.
        keep_last: how many of the latest calls keep their tensors.
        max_inflight_bytes: how many bytes may wait on a device to be copied.
        max_bytes_away: how many bytes may be elsewhere at one time.

    Raises:
        ModuleError: `module` is not an `nn.Module`.
        OptionError: a value is invalid, or the folder does not exist and `create` is False.
        OffloadError: the folder cannot be created or written to.

    Example:
        >>> import torch
        >>> offload_wrapper(torch.nn.Linear(4, 2))(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    return OffloadWrapper(
        module,
        to=to,
        create=create,
        min_bytes=min_bytes,
        keep_last=keep_last,
        max_inflight_bytes=max_inflight_bytes,
        max_bytes_away=max_bytes_away,
    )
