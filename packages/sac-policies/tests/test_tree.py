"""All plans for a few values: the best one is found, and known to be."""

from __future__ import annotations

import pytest

from sac_policies.budget._knapsack import pack
from sac_policies.budget.offloading import _tree
from sac_policies.budget.offloading._bounds import Prices, Values
from sac_policies.budget.offloading._choice import _Search
from sac_policies.budget.offloading._copies import Copies
from sac_policies.budget.offloading._tree import Tree

from ._copied import least_cost, random_region

FREE = Prices(0, 0)


# The last one is found only with what is under way counted from where the forward is.
@pytest.mark.parametrize("seed", [*range(60), 386])
def test_the_best_plan_is_found(seed: int) -> None:
    """From any plan that is worse; with bounds that rule out nothing, and with the search's."""
    trace, rate, regions, capacity = random_region(seed)
    copies = Copies.of(trace.ops, rate, regions)
    values = Values(trace.items("contexts"), copies, capacity)
    least, dearest = least_cost(trace, copies, capacity), sum(values.repeat) + 1
    for prices in ([FREE], _Search(values, pack).prices):
        tree = Tree(values, prices, dearest)
        assert tree.ends()
        assert tree.cost == least
        kept, away = set(tree.kept), set(tree.away)
        assert values.fits(kept)
        repeated = sum(values.repeat[n] for n in values.all if n not in kept | away)
        assert repeated + values.waits(away) == least
        assert not kept & away


def test_a_plan_that_is_the_best_stays() -> None:
    """No other one is told."""
    trace, rate, regions, capacity = random_region(3)
    copies = Copies.of(trace.ops, rate, regions)
    values = Values(trace.items("contexts"), copies, capacity)
    tree = Tree(values, [FREE], least_cost(trace, copies, capacity))
    assert tree.ends()
    assert (tree.kept, tree.away) == ((), ())


def test_a_search_that_is_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked at no more decisions than it may."""
    trace, rate, regions, capacity = random_region(3)
    monkeypatch.setattr(_tree, "_NODES", 5)
    values = Values(trace.items("contexts"), Copies.of(trace.ops, rate, regions), capacity)
    assert not Tree(values, [FREE], sum(values.repeat)).ends()
