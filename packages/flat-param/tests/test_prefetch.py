"""Lists of what is gathered ahead, of units that are only names here."""

from __future__ import annotations

import itertools
import random

from flat_param.sharded._prefetch import PrefetchLists


def test_backward_order_has_every_unit_once() -> None:
    """A list moves units forward and leaves the others as they were."""
    lists: PrefetchLists[str] = PrefetchLists()
    assert lists.backward_order("dcba") == list("dcba")
    lists.backward = {"d": ("b", "d", "b"), "c": ("d", "a")}
    assert lists.backward_order("dcba") == list("dbca")


def test_order_of_gathers_is_the_same_whatever_units_are_left_out() -> None:
    """Each unit that begins takes the queue up to itself and what it lists, never out of turn."""
    dice = random.Random(0)
    for _ in range(200):
        lists: PrefetchLists[str] = PrefetchLists()
        lists.backward = {unit: tuple(dice.choices("abcde", k=2)) for unit in dice.choices("abcde")}
        order = lists.backward_order("edcba")
        for begun in itertools.combinations("edcba", 3):
            queue, taken = list(order), list[str]()
            for unit in begun:
                if unit in queue:
                    taken += [queue.pop(0) for _ in range(queue.index(unit) + 1)]
                taken += [
                    queue.pop(0) for _ in range(min(lists.in_backward(unit, queue), len(queue)))
                ]
                listed = lists.backward.get(unit, ())
                assert {unit, *listed} <= set(taken)
            assert taken + queue == order


def test_units_that_have_begun_are_not_gathered_ahead() -> None:
    """Nor is anything where the order was another the last time."""
    lists: PrefetchLists[str] = PrefetchLists()
    a, b, c, d = "abcd"
    assert lists.in_forward(b, begun=[a, b], last_order=[a, b, c]) == [c]
    assert lists.in_forward(b, begun=[a, b], last_order=[a, c, b]) == []
    assert lists.in_forward(c, begun=[a, b, c], last_order=[a, b, c]) == []
    lists.forward[b] = (d, a, c)
    assert lists.in_forward(b, begun=[a, b], last_order=[a, b, c]) == [d, c]


def test_lists_of_a_nested_tree_are_taken_over() -> None:
    """What was said of inner units holds when the module around them is sharded."""
    lists: PrefetchLists[str] = PrefetchLists()
    inner: PrefetchLists[str] = PrefetchLists()
    inner.forward["a"], inner.backward["b"] = ("b",), ("a",)
    lists.merge(inner)
    assert (lists.forward, lists.backward) == ({"a": ("b",)}, {"b": ("a",)})
