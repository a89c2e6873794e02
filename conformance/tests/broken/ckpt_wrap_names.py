"""Wrappers with wrong names in state dicts, parameters, attributes and copies."""

from __future__ import annotations

from torch import nn

from torchparts_conformance.mutants import mutant

from .faults.ckpt_wrap import INNER, PREFIX, faulty


@mutant("CW-001 CW-010 CW-022")
def state_dict_keeps_the_prefix(part):
    """Keys of the state dict contain the wrapper's prefix."""
    working = part.CheckpointWrapper.state_dict

    def state_dict(self, *args, **kwargs):
        state = working(self, *args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for key in [k for k in state if k.startswith(prefix)]:
            state[prefix + PREFIX + key[len(prefix) :]] = state.pop(key)
        return state

    return faulty(part, state_dict=state_dict)


@mutant("CW-002 CW-019 CW-022")
def plain_state_dict_does_not_load(part):
    """Loads like any other module, with the wrapper's prefix in the names."""
    return faulty(part, _load_from_state_dict=nn.Module._load_from_state_dict)


@mutant("CW-010 CW-020 CW-021")
def parents_show_the_prefix(part):
    """Names from a parent contain the wrapper's prefix."""
    return faulty(part, named_modules=nn.Module.named_modules)


@mutant("CW-022")
def prefix_is_added_again(part):
    """A key with the prefix gets the prefix again when loaded."""
    working = part.CheckpointWrapper._load_from_state_dict

    def load(self, state_dict, prefix, *rest):
        for key in [k for k in state_dict if k.startswith(prefix + PREFIX)]:
            state_dict["again." + key] = state_dict.pop(key)
        working(self, state_dict, prefix, *rest)

    return faulty(part, _load_from_state_dict=load)


@mutant("CW-053")
def copies_as_the_module_wants(part):
    """The wrapped module's `__deepcopy__` is used for the wrapper."""
    working = part.CheckpointWrapper.__getattr__

    def getattr_(self, name):
        if name == "__deepcopy__" and "_modules" in self.__dict__:
            return getattr(getattr(self, INNER), name)
        return working(self, name)

    return faulty(part, __getattr__=getattr_)
