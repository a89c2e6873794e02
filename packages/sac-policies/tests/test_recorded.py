"""What is written down of a forward, and of which nothing is."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sac_policies import MATMULS, recompute_all, save_ops, span
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe.regions._recorded import (
    END,
    Later,
    RecordedRegion,
    Replayed,
    Watched,
)

from ._followed import ROWS, WIDTH, waiting
from ._recipe import leaf, run

PRODUCTS = save_ops(MATMULS)
W = leaf(6, 6)
SCALE = leaf(6)


def recorded(function: Callable[..., torch.Tensor], policy: object = PRODUCTS) -> RecordedRegion:
    """A forward that is written down, after one that is watched."""
    x = leaf(ROWS, WIDTH) if function is waiting else leaf(6, 6)
    run(function, x, policy=policy)
    region = RecordedRegion(known_of(policy).tables.anywhere, ((x,), {}))
    region.run(function, (x,), {})
    return region


def test_steps_say_what_was_kept_and_what_is_replayed() -> None:
    """In the order in which autograd asked, closed by one that no tensor agrees with."""
    steps = recorded(lambda x: F.silu(x @ W) @ W).steps
    assert steps is not None
    assert steps[-1] is END
    done = [what for _, _, what in steps[:-1]]
    (replayed,) = [what for what in done if isinstance(what, Replayed)]
    assert replayed.value.entry.rule.node == "SiluBackward0"
    assert replayed.value.readers == 1
    assert replayed.value.operands is None
    assert not replayed.is_result
    numbers = [number for number, _, _ in steps[:-1]]
    assert numbers == sorted(numbers)
    assert replayed.value.number < numbers[-1]


def test_callers_tensors_that_replays_read_are_watched() -> None:
    """A norm's scale, of which a copy is made as soon as a recipe reads it."""
    steps = recorded(lambda x: F.layer_norm(x @ W, (6,), SCALE, SCALE) @ W).steps
    assert steps is not None
    watched = [what for _, _, what in steps if isinstance(what, Watched)]
    assert any(each.is_read for each in watched)
    (replayed,) = [what for _, _, what in steps if isinstance(what, Replayed)]
    assert replayed.outers


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (lambda x: run(torch.sin, x @ W, policy=recompute_all()), PRODUCTS),
        (lambda x: span(torch.sin, "part")(x @ W), PRODUCTS),
    ],
    ids=["a region inside", "a span"],
)
def test_where_others_have_a_say_nothing_is_written_down(
    function: Callable[..., torch.Tensor], policy: object
) -> None:
    """Every forward decides for itself."""
    assert recorded(function, policy).steps is None


def test_what_waits_for_the_end_is_written_down_as_such() -> None:
    """What stands for it then comes after all that it reads."""
    region = recorded(waiting)
    assert region.steps is not None
    late = [what.replayed for _, _, what in region.steps if isinstance(what, Later)]
    assert [each.value.entry.rule.node for each in late] == ["CatBackward0"] * 4
    assert all(each.is_first and each.value.readers == 1 for each in late)


def test_a_result_that_waits_has_no_steps() -> None:
    """Its node would have to give it back."""

    def function(x: torch.Tensor) -> torch.Tensor:
        made = x @ W
        return (-made).sigmoid() * made.cos()

    assert recorded(function).steps is None


@pytest.mark.parametrize("again", [torch.sin, torch.exp])
def test_result_is_not_held_where_an_operand_was(again: Callable[..., torch.Tensor]) -> None:
    """What a node made, and holds with itself, would never be collected."""
    last = [torch.sin]

    def function(x: torch.Tensor) -> torch.Tensor:
        return last[0](x.exp())

    x, policy = leaf(3, 3), save_ops("aten.exp", "aten.sin")
    for _ in range(3):
        run(function, x, policy=policy)
    last[0] = again
    out = run(function, x, policy=policy)
    kept = weakref.ref(out)
    del out
    assert kept() is None
