"""What is known of the forwards of functions: of which, and for how long."""

from __future__ import annotations

from torch import Tensor

from sac_policies import recompute_all
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.engines.recipe.regions import _repeats
from sac_policies.policies._unmatched import subject_of

from ._recipe import leaf, run


def test_function_that_never_does_the_same_is_left_alone() -> None:
    """To write steps down that nobody follows costs time."""
    x, turn = leaf(4, 8), [0]

    def function(y: Tensor) -> Tensor:
        turn[0] += 1
        for _ in range(turn[0]):
            y = y.sin()
        return y

    for _ in range(12):
        run(function, x).sum().backward()
    shape = known_of(recompute_all()).repeats._shape(
        subject_of(function), habits_of(function), (x,)
    )
    assert shape is not None
    assert (shape.steps, shape.left) == (None, _repeats._MOST_LEFT)
