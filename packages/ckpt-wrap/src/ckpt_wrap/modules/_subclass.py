"""The class a module gets when it is changed in place, and the way back.

It is a subclass of the module's class, one per class, whose `forward` goes through the `Behaviour`
that the instance holds under `STATE`. The subclass has the name of its base, because class names
are data to others: configuration files, printed models, lists of layer types.

The class `parametrize` makes for a module stays the topmost, because removing a parametrization
takes the topmost away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ckpt_wrap._errors import ModuleError
from ckpt_wrap._where import describe, has_forward
from ckpt_wrap.checkpointing._options import require_module
from ckpt_wrap.modules._names import clean_in_place

STATE = "_ckpt_wrap"

_CLASS: Any = vars(object)["__class__"]


def set_class(module: object, kind: Any) -> None:
    """Change the class of a module, past its own `__setattr__`."""
    _CLASS.__set__(module, kind)


def is_parametrized_class(kind: Any) -> bool:
    """Whether `torch.nn.utils.parametrize` made the class, for one module and its copies."""
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", None) == parametrize.__name__


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


def require_forward(module: nn.Module, function: str, name: str = "") -> None:
    """Raise `ModuleError` if `module` has no forward, as `nn.ModuleList` has none."""
    if not has_forward(module):
        raise ModuleError(
            f"ckpt_wrap.{function}: module {describe(module, name)} has no forward, but only a "
            "module that is called can be checkpointed or offloaded. Wrap its items instead, one "
            "by one."
        )


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
