"""Functions under `recompute_all` whose forwards follow steps, and what is known of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sac_policies import recompute_all
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.engines.recipe.regions._at_edges import Value
from sac_policies.engines.recipe.regions._recorded import Replayed
from sac_policies.policies._unmatched import subject_of

from ._recipe import leaf, run

ALL = recompute_all()
W = leaf(8, 8)


def shape_of(function: Callable[..., Any], *args: Any) -> Any:
    """What is known of a function's forwards with such inputs."""
    return known_of(ALL).repeats._shape(subject_of(function), habits_of(function), args)


def learnt(function: Callable[..., Tensor], *given: Tensor) -> None:
    """Have it followed once."""
    for _ in range(3):
        run(function, *given).sum().backward()
    assert shape_of(function, *given).followed == 1


def values(function: Callable[..., Any], *args: Any) -> list[Value]:
    """What is replayed, in order of first steps."""
    steps = shape_of(function, *args).steps
    return [what.value for _, _, what in steps if isinstance(what, Replayed)]


def changed(value: Value, **changes: Any) -> Value:
    """The same value but for these attributes."""
    other = copy.copy(value)
    for name, to in changes.items():
        setattr(other, name, to)
    return other
