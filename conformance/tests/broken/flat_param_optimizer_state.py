"""Broken conversions of optimizer state; each fails exactly the requirements that it declares."""

from __future__ import annotations

import copy
from functools import partial

import torch

from torchparts_conformance.mutants import mutant, overlay


def _with(part, **methods):
    """The part with other methods of its flat views, called with the working view first."""

    def flatten(module, **options):
        flat = part.flatten(module, **options)
        return overlay(flat, **{name: partial(method, flat) for name, method in methods.items()})

    return overlay(part, flatten=flatten)


@mutant("FP-203")
def moments_begin_anew(part):
    """Loads the settings without the state."""

    def load(flat, optimizer, state):
        fresh = copy.deepcopy(state)
        for values in fresh["state"].values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    values[name] = torch.zeros_like(value)
        flat.load_optimizer_state(optimizer, fresh)

    return _with(part, load_optimizer_state=load)


@mutant("FP-203")
def moments_come_back_in_another_order(part):
    """Swaps the state of the first two parameters of equal shape."""

    def state_of(flat, optimizer):
        state = flat.optimizer_state(optimizer)
        names = list(state["state"])
        for one in names:
            for other in names:
                if one != other and _shapes(state, one) == _shapes(state, other):
                    values = state["state"]
                    values[one], values[other] = values[other], values[one]
                    return state
        return state

    return _with(part, optimizer_state=state_of)


def _shapes(state, name):
    return [getattr(value, "shape", None) for value in state["state"][name].values()]


@mutant("FP-203")
def wrong_state_is_passed_over(part):
    """Silently continues if the state is of other parameters."""

    def load(flat, optimizer, state):
        try:
            flat.load_optimizer_state(optimizer, state)
        except (RuntimeError, ValueError):
            return

    return _with(part, load_optimizer_state=load)
