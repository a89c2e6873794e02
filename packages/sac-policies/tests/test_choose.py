"""The solver is exact on small instances, near the optimum on large ones, and never over."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_policies.budget._choose import Option, cheapest

SIZES = st.integers(0, 40)
ITEMS = st.lists(st.tuples(SIZES, SIZES), max_size=9)


def pack(rows: list[tuple[int, int]], capacity: int) -> tuple[int, int]:
    """Weight and value of the items that are taken; of value per weight, the highest first."""
    rows = sorted(rows, key=lambda row: -row[1] / max(1, row[0]))
    parts = [(Option(w, 0, capacity - w), Option(0, v, capacity)) for w, v in rows]
    found = cheapest(parts, start=0, limit=capacity)
    assert found is not None
    taken = [row for row, option in zip(rows, found, strict=True) if option == 0]
    return sum(w for w, _ in taken), sum(v for _, v in taken)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ITEMS, st.integers(0, 200))
def test_small_instances_are_solved_exactly(rows: list[tuple[int, int]], capacity: int) -> None:
    """The value equals that of exhaustive search."""
    subsets = [
        [row for row, kept in zip(rows, which, strict=True) if kept]
        for which in itertools.product([0, 1], repeat=len(rows))
    ]
    best = max(sum(v for _, v in each) for each in subsets if sum(w for w, _ in each) <= capacity)
    weight, value = pack(rows, capacity)
    assert value == best
    assert weight <= capacity


def lognormal(n: int, seed: int) -> list[tuple[int, int]]:
    """Sizes and costs as spread as those of operators."""
    r = random.Random(seed)
    return [(int(r.lognormvariate(14, 2)) + 1, int(r.lognormvariate(10, 2))) for _ in range(n)]


def correlated(shift: int) -> list[tuple[int, int]]:
    """Items of nearly equal value per weight."""
    r = random.Random(1)
    weights = [r.randrange(1, 1 << 20) * 2 for _ in range(500)]
    return [(w, w + shift) for w in weights]


def divisible(rows: list[tuple[int, int]], capacity: int) -> float:
    """Value of a choice that may split items: no other is worth more."""
    total = 0.0
    for weight, value in sorted(rows, key=lambda row: -row[1] / row[0]):
        taken = min(weight, capacity)
        total, capacity = total + value * taken / weight, capacity - taken
    return total


@pytest.mark.parametrize(
    "rows",
    [*(lognormal(500, seed) for seed in range(4)), correlated(0), correlated(100_000)],
    ids=["spread"] * 4 + ["subset sum", "strongly correlated"],
)
def test_large_instances_are_within_half_a_percent(rows: list[tuple[int, int]]) -> None:
    """Of a bound, although few pairs are followed."""
    capacity = sum(w for w, _ in rows) * 2 // 5
    weight, value = pack(rows, capacity)
    assert weight <= capacity
    assert value >= 0.995 * divisible(rows, capacity)


def test_bytes_before_a_part_limit_its_options() -> None:
    """An option is left out where more bytes lie before it than it has room for."""
    first = [Option(5, 0, 10), Option(0, 3, 10)]
    last = [Option(0, 0, 4)]
    assert cheapest([first, last], start=0, limit=10) == [1, 0]
    assert cheapest([first, last], start=5, limit=10) is None
    assert cheapest([], start=0, limit=0) == []
    assert cheapest([], start=1, limit=0) is None
