"""What lets other code reach a wrapped module's state through its wrapper."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ckpt_wrap._torch_compat import edges
from ckpt_wrap.modules._names import PREFIX, WRAPPED_MODULE, add_prefix
from ckpt_wrap.modules._subclass import set_class
from ckpt_wrap.modules._versions import hand_down

_ASKERS = (parametrize.__name__, parametrizations.__name__)


class InnerDict(dict[str, Any]):
    """Empty to iterate, but looks up, sets and deletes entries of another dict.

    Keeps `get_buffer`, `prune` and `functional_call`, which reach into a module's dicts,
    working through a wrapper without any entry being counted twice.
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


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper, this package's or torch's own."""
    return any(name == WRAPPED_MODULE for name, _ in edges(module))


def innermost(module: nn.Module) -> nn.Module:
    """The module within all wrappers around it."""
    while is_wrapper(module):
        module = module.get_submodule(WRAPPED_MODULE)
    return module


class ClassOfInner:
    """To `torch.nn.utils.parametrize`, which works on classes, the wrapper is what it wraps.

    It makes a class for `module.__class__`, gives it to the module and puts a property into it;
    in the wrapper's own class the wrapped module would not find that property.
    """

    @property
    def __class__(self: Any) -> Any:
        return type(innermost(self)) if asked_by_parametrize() else type(self)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        set_class(self, kind)


def asked_by_parametrize() -> bool:
    """Whether what calls this was called by `torch.nn.utils.parametrize` and its users in torch."""
    return sys._getframe(2).f_globals.get("__name__") in _ASKERS


def before_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    add_prefix(state_dict, prefix)
    inner = module.get_submodule(WRAPPED_MODULE)
    module.__dict__["_loading"] = errors, hand_down(inner, prefix + PREFIX)
    _give_metadata(inner, local_metadata)


def _give_metadata(inner: nn.Module, local_metadata: dict[str, Any]) -> None:
    """Have the inner module see, once, the version saved under the wrapper's name.

    Unless it has one of its own; for code that loads without `load_state_dict`.
    """
    load = inner._load_from_state_dict

    def load_once(
        state_dict: dict[str, Any], prefix: str, own_metadata: dict[str, Any], *rest: Any
    ) -> None:
        inner.__dict__.pop("_load_from_state_dict", None)
        load(state_dict, prefix, {**local_metadata, **own_metadata}, *rest)

    inner.__dict__["_load_from_state_dict"] = load_once


def after_load(module: nn.Module, incompatible: Any) -> None:
    errors, put_back = module.__dict__.pop("_loading", ([], tuple))
    put_back()
    for messages in (errors, incompatible.missing_keys, incompatible.unexpected_keys):
        messages[:] = [message.replace(PREFIX, "") for message in messages]
