"""Which region's hooks are the innermost."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from sac_policies import recompute_all
from sac_policies.engines.recipe.regions._around import Packs, region_around

from ._recipe import leaf, run


def test_there_is_none_outside_and_under_hooks_of_others() -> None:
    """Theirs are asked for nothing."""
    assert region_around() is None
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert region_around() is None


def test_it_is_the_region_that_runs_whatever_forward_it_is() -> None:
    """Watched, written down, or following: each answers with what decides."""
    found: list[Any] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        found.append(region_around())
        return (x @ x).sin()

    for _ in range(4):
        run(body, leaf(3, 3), policy=recompute_all())
    assert all(isinstance(each, Packs) for each in found)
    assert len(set(map(id, found))) == 4


def test_the_inner_of_two_is_found() -> None:
    """And the outer one again behind it."""
    found: list[Any] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        found.append(region_around())
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        found.append(region_around())
        y = run(inner, x, policy=recompute_all())
        found.append(region_around())
        return y

    run(outer, leaf(3), policy=recompute_all())
    before, within, after = found
    assert before is after
    assert within is not before
