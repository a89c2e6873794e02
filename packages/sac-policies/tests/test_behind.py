"""A value is as it was written down where the graph behind it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sac_policies._torch_compat import node_number, sequence_number
from sac_policies.engines.recipe._replay_entries import every_rule
from sac_policies.engines.recipe.regions._behind import Behind, Looked, note_behind

from ._recipe import leaf

X, W = leaf(4, 4), leaf(4, 4)


def _sum(x: Tensor) -> Tensor:
    made = (x @ W).view(2, 8).view(4, 4)
    return made.neg() + (made + x) + 1.0


def _noted(function: Callable[[Tensor], Tensor]) -> tuple[dict[int, Behind], int]:
    """What lies behind a value, and its number."""
    found: dict[int, Behind] = {}
    first, node = sequence_number(), function(X).grad_fn
    note_behind(found, node, first, (), every_rule)
    return found, node_number(node) - first


def _agrees(found: dict[int, Behind], at: int, function: Callable[[Tensor], Tensor]) -> bool:
    first = sequence_number()
    made = function(X)
    return Looked(found, first).agrees(made.grad_fn, at, ())


def test_graph_is_written_down_as_far_as_a_replay_reads_it() -> None:
    """The product saved what its rule reads: what lies behind it does not matter."""
    found, at = _noted(_sum)
    assert at == max(found)
    product = found[0]
    assert product.kind.__name__ == "MmBackward0"
    assert product.ready is every_rule[product.kind]
    assert product.edges == ()
    others = [each for number, each in found.items() if number]
    assert {each.ready for each in others} == {None}
    assert len(others) == 6
    assert _agrees(found, at, _sum)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x @ W).view(2, 8).view(4, 4).neg() + (x.neg() + x) + 1.0,
        lambda x: _product(x, lambda made: made.neg() + (made + x) + x),
        lambda x: _product(x, lambda made: made.abs() + (made + x) + 1.0),
        lambda x: _product(x, lambda made: made.neg() + (x + made) + 1.0),
        lambda x: _product(x, lambda made: made.neg() + (made + x.detach()) + 1.0),
        lambda x: (x.neg(), _sum(x))[1],
        lambda x: (x.detach() @ W).view(2, 8).view(4, 4).neg() + (W + x) + 1.0,
    ],
    ids=["shorter", "no number", "kind", "order", "no edge", "shifted", "operand"],
)
def test_other_graph_does_not_agree(other: Callable[[Tensor], Tensor]) -> None:
    """Of another kind, elsewhere, or with other edges."""
    found, at = _noted(_sum)
    assert not _agrees(found, at, other)


def _product(x: Tensor, after: Callable[[Tensor], Tensor]) -> Tensor:
    return after((x @ W).view(2, 8).view(4, 4))


def test_other_output_does_not_agree() -> None:
    """Of two parts, the first was read."""
    found, at = _noted(lambda x: (x @ W).chunk(2)[0] + 1.0)
    assert _agrees(found, at, lambda x: (x @ W).chunk(2)[0] + 1.0)
    assert not _agrees(found, at, lambda x: (x @ W).chunk(2)[1] + 1.0)


def test_node_that_saved_less_does_not_agree() -> None:
    """A product with what needs no gradient has nothing of the other operand."""
    found, at = _noted(lambda x: x * W)
    assert _agrees(found, at, lambda x: x * W)
    assert not _agrees(found, at, lambda x: x * W.detach())


def test_each_node_is_looked_at_once() -> None:
    """Whoever comes by again is known; another node in its place is not."""
    found, at = _noted(_sum)
    looked = Looked(found, sequence_number())
    node = _sum(X).grad_fn
    assert looked.agrees(node, at, ())
    assert looked.agrees(node, at, ())
    assert not looked.agrees(_sum(X).grad_fn, at, ())
    looked.forget()


def test_what_the_caller_made_is_no_node_of_the_region() -> None:
    """Its number may be one of them, on another thread: it is told by itself."""
    made = torch.sin(X)
    found: dict[int, Behind] = {}
    note_behind(found, made.grad_fn, 0, (made.grad_fn,), every_rule)
    assert found == {}


def test_other_number_of_operands_does_not_agree() -> None:
    """Three parts are put together where there were two."""
    found, at = _noted(lambda x: torch.cat((x, W)))
    assert _agrees(found, at, lambda x: torch.cat((x, W)))
    assert not _agrees(found, at, lambda x: torch.cat((x, W, W)))
