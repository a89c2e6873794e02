"""Checkpoint wrappers under other names: in state dicts, parameters, attributes and copies."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from torchparts_conformance.mutants import mutant

from .faults.ckpt_wrap import INNER, PREFIX, faulty, faulty_init


@mutant(
    area="ckpt-wrap",
    kills={"CW-001", "CW-010", "CW-022", "CW-023", "CW-024", "CW-026", "CW-049"},
)
def state_dict_keeps_the_prefix(part):
    """Keys of the state dict show the wrapper."""
    working = part.CheckpointWrapper.state_dict

    def state_dict(self, *args, **kwargs):
        state = working(self, *args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for key in [k for k in state if k.startswith(prefix)]:
            state[prefix + PREFIX + key[len(prefix) :]] = state.pop(key)
        return state

    return faulty(part, state_dict=state_dict)


@mutant(area="ckpt-wrap", kills={"CW-002", "CW-019", "CW-022", "CW-023", "CW-024", "CW-051"})
def plain_state_dict_does_not_load(part):
    """Loads as any module does, which takes the wrapper for a part of the names."""
    return faulty(part, _load_from_state_dict=nn.Module._load_from_state_dict)


@mutant(area="ckpt-wrap", kills={"CW-010", "CW-020", "CW-021"})
def parents_show_the_prefix(part):
    """Names a parent gives contain the wrapper's part."""
    return faulty(part, named_modules=nn.Module.named_modules)


@mutant(area="ckpt-wrap", kills={"CW-022"})
def prefix_is_added_again(part):
    """A key that carries the prefix gets it once more when loaded."""
    working = part.CheckpointWrapper._load_from_state_dict

    def load(self, state_dict, prefix, *rest):
        for key in [k for k in state_dict if k.startswith(prefix + PREFIX)]:
            state_dict["again." + key] = state_dict.pop(key)
        working(self, state_dict, prefix, *rest)

    return faulty(part, _load_from_state_dict=load)


@mutant(area="ckpt-wrap", kills={"CW-023"})
def load_errors_show_the_prefix(part):
    """Keys in messages are the wrapper's."""
    working = part.CheckpointWrapper._load_from_state_dict

    def load(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        found = []
        working(self, state_dict, prefix, metadata, strict, found, unexpected, errors)
        missing += [prefix + PREFIX + key[len(prefix) :] for key in found]

    return faulty(part, _load_from_state_dict=load)


@mutant(area="ckpt-wrap", kills={"CW-024"})
def versions_are_the_wrappers(part):
    """The state dict says version 1 for the wrapped module."""
    working = part.CheckpointWrapper.state_dict

    def state_dict(self, *args, **kwargs):
        state = working(self, *args, **kwargs)
        if hasattr(state, "_metadata"):
            state._metadata[kwargs.get("prefix", "")[:-1]] = {"version": 1}
        return state

    return faulty(part, state_dict=state_dict)


@mutant(area="ckpt-wrap", kills={"CW-025", "CW-027", "CW-030"})
def buffers_are_not_found(part):
    """The wrapper's own dict of buffers is empty."""
    return faulty_init(part, lambda wrapper: wrapper.__dict__.update(_buffers={}))


@mutant(area="ckpt-wrap", kills={"CW-026"})
def layers_are_set_on_the_wrapper(part):
    """A module assigned through the wrapper stays on it."""
    working = part.CheckpointWrapper.__setattr__

    def setattr_(self, name, value):
        if name == "linear":
            self.__dict__[name] = value
        else:
            working(self, name, value)

    return faulty(part, __setattr__=setattr_)


@mutant(area="ckpt-wrap", kills={"CW-027"})
def flags_are_set_on_the_wrapper(part):
    """A plain attribute assigned through the wrapper stays on it."""
    working = part.CheckpointWrapper.__setattr__

    def setattr_(self, name, value):
        if name == "flag":
            self.__dict__[name] = value
        else:
            working(self, name, value)

    return faulty(part, __setattr__=setattr_)


@mutant(area="ckpt-wrap", kills={"CW-028"})
def has_no_length(part):
    """`len` is not forwarded."""

    def length(self):
        raise TypeError("object of type 'CheckpointWrapper' has no len()")

    return faulty(part, __len__=length, __bool__=lambda self: True)


@mutant(area="ckpt-wrap", kills={"CW-029"})
def looks_for_the_inner_module_forever(part):
    """An instance without an inner module recurses."""
    working = part.CheckpointWrapper.__getattr__

    def getattr_(self, name):
        if "_modules" not in self.__dict__:
            return getattr(self, INNER)
        return working(self, name)

    return faulty(part, __getattr__=getattr_)


@mutant(area="ckpt-wrap", kills={"CW-027", "CW-030"})
def parameters_are_not_found(part):
    """The wrapper's own dict of parameters is empty."""
    return faulty_init(part, lambda wrapper: wrapper.__dict__.update(_parameters={}))


@mutant(area="ckpt-wrap", kills={"CW-049"})
def every_wrapper_scans_the_state_dict(part):
    """Taking the state dict, each wrapper goes through all entries there are."""
    working = part.CheckpointWrapper.state_dict

    def state_dict(self, *args, **kwargs):
        state = working(self, *args, **kwargs)
        list(state.keys())
        return state

    return faulty(part, state_dict=state_dict)


def forget_versions_below(wrapper: Any, *_: Any) -> None:
    """Have the modules below the wrapped one see no version, in the load that begins."""
    for module in list(getattr(wrapper, INNER).modules())[1:]:
        load = type(module)._load_from_state_dict
        load_once = functools.partial(load_without_version, module, load)
        vars(module)["_load_from_state_dict"] = load_once


def load_without_version(
    module: Any, load: Any, state_dict: Any, prefix: str, _: Any, *rest: Any
) -> None:
    """Load once without what the state dict says of the version."""
    vars(module).pop("_load_from_state_dict")
    load(module, state_dict, prefix, {}, *rest)


@mutant(area="ckpt-wrap", kills={"CW-051"})
def versions_below_the_wrapped_module_are_lost(part):
    """Only the wrapped module itself sees its version."""
    return faulty_init(
        part, lambda wrapper: wrapper.register_load_state_dict_pre_hook(forget_versions_below)
    )


@mutant(area="ckpt-wrap", kills={"CW-053"})
def copies_as_the_module_wants(part):
    """The wrapped module's way of being copied is taken for the wrapper's."""
    working = part.CheckpointWrapper.__getattr__

    def getattr_(self, name):
        if name == "__deepcopy__" and "_modules" in self.__dict__:
            return getattr(getattr(self, INNER), name)
        return working(self, name)

    return faulty(part, __getattr__=getattr_)
