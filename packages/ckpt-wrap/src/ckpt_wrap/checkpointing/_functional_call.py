"""Weights that `torch.func.functional_call` gives a module for one call.

Rule 1. They are put in again for the second run, which is after `functional_call` took them out.
        Those that require grad are inputs of the call, saved as autograd saves any tensor; others
        are as the module's own buffers, which forward may change.
Rule 2. Nobody else's change of weights is undone. Sharding, parametrization and optimizers replace
        or change tensors between the runs too, and are right to: so what counts is not that a
        tensor differs, but that a `functional_call` that is running now has it among its own.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

_FUNC = inspect.unwrap(torch.func.functional_call).__code__
_STATELESS = inspect.unwrap(stateless.functional_call).__code__

Place = tuple[dict[str, Any], str]


class _PutIn(threading.local):
    ids: frozenset[int] = frozenset()  # of the tensors a second run has put in


_put_in = _PutIn()


@dataclass(frozen=True, slots=True)
class ReplacedWeights:
    """The places of a module where tensors of a `functional_call` are."""

    places: tuple[Place, ...] = ()  # of those that require grad
    others: tuple[tuple[Place, torch.Tensor], ...] = ()

    @contextlib.contextmanager
    def put_in(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have the last of the inputs, one for each place, in the places."""
        weights = inputs[len(inputs) - len(self.places) :]
        wanted = [*zip(self.places, weights, strict=True), *self.others]
        outer = _put_in.ids
        before: list[tuple[Place, Any]] = []
        try:
            for (tensors, name), weight in wanted:
                own = tensors.get(name, _put_in)
                if own is not weight:
                    before.append(((tensors, name), own))
                    tensors[name] = weight
            _put_in.ids = outer.union(id(weight) for _, weight in wanted)
            yield
        finally:
            _put_in.ids = outer
            for (tensors, name), own in before:
                if own is _put_in:  # an attribute the module does not have
                    tensors.pop(name, None)
                else:
                    tensors[name] = own


_NONE = ReplacedWeights()


def replaced_weights(module: nn.Module | None) -> tuple[list[torch.Tensor], ReplacedWeights]:
    """The tensors that running calls of `functional_call` have put into a module, and where.

    Returns:
        Those that require grad, to be the last of the inputs, and the places of all.
    """
    ids = _given()
    if not ids or module is None:
        return [], _NONE
    found = [
        ((place, name), tensor)
        for below in module.modules()
        for place in (below._parameters, below._buffers, vars(below))
        for name, tensor in place.items()
        if id(tensor) in ids and isinstance(tensor, torch.Tensor)
    ]
    weights = [(place, tensor) for place, tensor in found if tensor.requires_grad]
    others = tuple((place, tensor) for place, tensor in found if not tensor.requires_grad)
    places = tuple(place for place, _ in weights)
    return [tensor for _, tensor in weights], ReplacedWeights(places, others)


def _given() -> set[int]:
    """Identities of the tensors given to the calls that are running in this thread."""
    ids = set(_put_in.ids)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code is _FUNC or code is _STATELESS:
            given = frame.f_locals[code.co_varnames[1]]  # its second argument
            for tensors in (given,) if isinstance(given, dict) else given:
                ids.update(map(id, tensors.values()))
        frame = frame.f_back
    return ids
