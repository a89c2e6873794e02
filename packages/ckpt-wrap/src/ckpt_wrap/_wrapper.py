"""The drop-in layer: a module that holds the wrapped module and acts like it.

- Names: the wrapper adds nothing to the names of parameters, buffers, modules and state-dict
  entries. Only attribute paths and `named_children` show the wrapped module.
- The wrapper shares the state-dict hooks and the `state_dict` of the wrapped module, and looks up
  its parameters and buffers. So `get_buffer`, `prune` and `functional_call` reach through it.
- Attributes that the wrapper's class or instance does not define are the wrapped module's.
- A state dict loads whether or not its keys carry the prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ckpt_wrap._checkpoint_fn import make_checkpoint_fn
from ckpt_wrap._errors import OptionError, require_module
from ckpt_wrap._offload import Offload
from ckpt_wrap._options import (
    CheckpointFn,
    CheckpointImpl,
    CheckpointOptions,
    OffloadOptions,
    wrapping_with,
)
from ckpt_wrap._torch_compat import edges, never_compiled

WRAPPED_MODULE = "_checkpoint_wrapped_module"
PREFIX = WRAPPED_MODULE + "."

T = TypeVar("T")

_SHARED = (
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True, slots=True, eq=False)  # the compiler of torch 2.9 hashes an empty one
class Behaviour:
    """The checkpoint function and the offload of a module's forward.

    Offload is around checkpoint: activations are recomputed, so only the inputs can be offloaded.
    """

    checkpoint: CheckpointFn | None = None
    offload: Callable[..., Any] | None = None

    @never_compiled
    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the forward through them."""
        if self.offload is None:
            return self.checkpoint(forward, *args, **kwargs)  # type: ignore[misc]  # one is set
        if self.checkpoint is None:
            return self.offload(forward, *args, **kwargs)
        return self.offload(self.checkpoint, forward, *args, **kwargs)


class InnerDict(dict[str, Any]):
    """Looks up, sets and deletes entries of another dict, and is empty to iterate.

    So no parameter or buffer is counted twice.
    """

    def __init__(self, target: dict[str, Any]) -> None:
        super().__init__()
        self.target = target

    def __reduce__(self) -> tuple[type[InnerDict], tuple[dict[str, Any]]]:
        return InnerDict, (self.target,)

    def __contains__(self, key: object) -> bool:
        return key in self.target

    def __getitem__(self, key: str) -> Any:
        return self.target[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.target[key] = value

    def __delitem__(self, key: str) -> None:
        del self.target[key]


class Children(dict[str, Any]):
    """The dict of submodules of a wrapper.

    `nn.Module.load_state_dict` calls `_load_from_state_dict` of a module, then visits the items of
    its `_modules`, whose keys it takes for parts of names. When a wrapper has loaded the wrapped
    module, it sets `skip_wrapped`, and the next visit finds the submodules of that module.
    """

    skip_wrapped = False

    def items(self) -> Any:
        """Names and submodules."""
        if not self.skip_wrapped:
            return super().items()
        self.skip_wrapped = False
        return self[WRAPPED_MODULE]._modules.items()


class ActivationWrapper(nn.Module):
    """Base of the two wrappers; holds the wrapped module as `_checkpoint_wrapped_module`.

    Attributes, items, parameters, buffers and state dicts are those of the wrapped module. The
    class is not: `isinstance(wrapper, Block)` is False.

    Args:
        mod: the module to wrap.

    Raises:
        ModuleError: `mod` is not an `nn.Module`.
    """

    _caller: Callable[..., Any]  # the checkpoint function or the offload

    def __init__(self, mod: nn.Module) -> None:
        require_module(mod, type(self).__name__)
        super().__init__()
        self.__dict__["_modules"] = Children({WRAPPED_MODULE: mod})
        self._share()

    def _share(self) -> None:
        inner, own = self._inner(), self.__dict__
        own.update((name, getattr(inner, name)) for name in _SHARED)
        own["_parameters"] = InnerDict(inner._parameters)
        own["_buffers"] = InnerDict(inner._buffers)
        if type(self).state_dict is ActivationWrapper.state_dict:  # saves a call
            own["state_dict"] = inner.state_dict

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, then the wrapped module and all below it, under the same name."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._inner().named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state dict."""
        return self._inner().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], *rest: Any) -> None:
        clean_in_place(state_dict)
        self._inner()._load_from_state_dict(state_dict, *rest)
        self.__dict__["_modules"].skip_wrapped = True

    def _inner(self) -> nn.Module:
        inner: nn.Module = self._modules[WRAPPED_MODULE]  # type: ignore[assignment]  # never None
        return inner

    def _owns(self, name: str) -> bool:
        own = self.__dict__
        return name in own or name == WRAPPED_MODULE or hasattr(type(self), name)

    def __getattr__(self, name: str) -> Any:
        # An instance made by __new__ alone has no _modules yet; looking it up must not recurse.
        modules = self.__dict__.get("_modules", {})
        # Special methods, such as __deepcopy__, of the wrapped module would copy that module alone.
        special = name.startswith("__") and name.endswith("__")
        if special or WRAPPED_MODULE not in modules:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        inner = modules[WRAPPED_MODULE]
        return inner if name == WRAPPED_MODULE else getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if WRAPPED_MODULE not in self.__dict__.get("_modules", {}) or self._owns(name):
            super().__setattr__(name, value)
            if name == WRAPPED_MODULE:
                self._share()
        else:
            setattr(self._inner(), name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            super().__delattr__(name)
        else:
            delattr(self._inner(), name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add the module to the wrapped module."""
        self._inner().add_module(name, module)

    def __getitem__(self, key: Any) -> Any:
        inner: Any = self._inner()
        return inner[key]


class CheckpointWrapper(ActivationWrapper):
    """A module whose forward is checkpointed; made by `checkpoint_wrapper`.

    Args:
        mod: the module to wrap.
        checkpoint_impl: accepted as in torch; both values run the same implementation.
        checkpoint_fn: a checkpoint function. None: this package's own.
        **options: the other options of `checkpoint_`.

    Raises:
        ModuleError: `mod` is not an `nn.Module`.
        OptionError: an option has a wrong value, or needs a `checkpoint_fn`.
    """

    checkpoint_impl: CheckpointImpl
    checkpoint_fn: CheckpointFn

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: CheckpointFn | None = None,
        **options: Any,
    ) -> None:
        super().__init__(mod)
        made = make_checkpoint_fn(
            CheckpointOptions("checkpoint_wrapper", checkpoint_impl, checkpoint_fn, **options)
        )
        # Set in the instance's dict: setattr would set them on the wrapped module.
        self.__dict__.update(checkpoint_impl=checkpoint_impl, checkpoint_fn=made, _caller=made)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, checkpointed."""
        inner: Any = self._modules[WRAPPED_MODULE]
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if isinstance(inner, OffloadWrapper):
            both = Behaviour(self.checkpoint_fn, inner._caller)
            return both(inner._inner(), *args, **kwargs)
        return self.checkpoint_fn(inner, *args, **kwargs)


class OffloadWrapper(ActivationWrapper):
    """A module whose saved tensors are offloaded; made by `offload_wrapper`.

    Args:
        mod: the module to wrap.
        **options: the options of `offload_`.

    Raises:
        ModuleError: `mod` is not an `nn.Module`.
        OptionError: an option has a wrong value, or there is no such folder.
        OffloadError: the folder cannot be written to.
    """

    def __init__(self, mod: nn.Module, **options: Any) -> None:
        super().__init__(mod)
        self.__dict__["_caller"] = Offload(OffloadOptions("offload_wrapper", **options))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, offloading what it saves."""
        return self._caller(self._inner(), *args, **kwargs)


@wrapping_with(CheckpointOptions)
def checkpoint_wrapper(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """Wrap a module so that backward recomputes what its forward would have saved.

    It has the name and the parameters of torch's function, and the names of parameters, buffers and
    state-dict entries stay plain. Options and recomputation are those of `checkpoint_`, which
    describes them, what recomputation sees, and errors in forward and backward. The first two
    options, `checkpoint_impl` and `checkpoint_fn`, may be passed by position.

    Args:
        module: the module to wrap; unlike for `checkpoint_`, also one whose class cannot change,
            such as a TorchScript module.

    Returns:
        A `CheckpointWrapper` with `module` as its `_checkpoint_wrapped_module`.

    Raises:
        ModuleError: not an `nn.Module`.
        OptionError: an option has a wrong value, or needs a `checkpoint_fn`.

    Example:
        >>> import torch
        >>> block = checkpoint_wrapper(torch.nn.Linear(4, 2))
        >>> list(block.state_dict())
        ['weight', 'bias']
    """
    return CheckpointWrapper(module, *args, **options)


@wrapping_with(OffloadOptions)
def offload_wrapper(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """Wrap a module so that the tensors it saves for backward move elsewhere.

    Options and offload are those of `offload_`, which describes them, which tensors move, and
    errors in forward and backward.

    Args:
        module: the module to wrap.

    Returns:
        An `OffloadWrapper` with `module` as its `_checkpoint_wrapped_module`.

    Raises:
        ModuleError: not an `nn.Module`.
        OptionError: an option has a wrong value, or there is no such folder.
        OffloadError: the folder cannot be written to.

    Warns:
        UserWarning: `to` is host memory and there is no accelerator, so nothing moves.

    Example:
        >>> import tempfile, torch
        >>> block = offload_wrapper(torch.nn.Linear(4, 2), to=tempfile.gettempdir())
        >>> block(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    return OffloadWrapper(module, *args, **options)


def clean_name(name: str) -> str:
    """A parameter or module name without the wrapper's prefix."""
    return ".".join(part for part in name.split(".") if part != WRAPPED_MODULE)


def clean_state_dict(state_dict: Mapping[str, T]) -> dict[str, T]:
    """Return a state dict without the wrapper's prefix in its keys.

    Needed only for other code: models with this package's wrappers load both kinds of keys.

    Args:
        state_dict: any mapping from names to values, such as one saved under torch's wrapper.

    Returns:
        A new dict in the same order, with the same objects as values. Versions of modules, in
        `_metadata`, are kept under the plain names.

    Raises:
        OptionError: `state_dict` is not a mapping.

    Example:
        >>> dict(clean_state_dict({"0._checkpoint_wrapped_module.weight": 1}))
        {'0.weight': 1}
    """
    if not isinstance(state_dict, Mapping):
        raise OptionError(
            f"ckpt_wrap.clean_state_dict: state_dict is of type {type(state_dict).__name__}, but "
            "it must map names to values. Pass model.state_dict(), or what torch.load returned."
        )
    clean: Any = OrderedDict((clean_name(name), value) for name, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # A module comes after its wrapper, so the version of the module is kept.
        clean._metadata = {clean_name(name): value for name, value in metadata.items()}
    cleaned: dict[str, T] = clean
    return cleaned


def clean_in_place(state_dict: dict[str, Any]) -> None:
    """Rename the keys that carry the prefix, keeping the order of all keys."""
    if not any(PREFIX in key for key in state_dict):
        return
    items = [(clean_name(key), value) for key, value in state_dict.items()]
    state_dict.clear()
    state_dict.update(items)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper, this package's or torch's own."""
    return any(name == WRAPPED_MODULE for name, _ in edges(module))


def innermost(module: nn.Module) -> nn.Module:
    """The module within all wrappers around it."""
    while is_wrapper(module):
        module = module.get_submodule(WRAPPED_MODULE)
    return module
