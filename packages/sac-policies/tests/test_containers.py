"""What containers and objects hold is noted, compared, and given again in copies."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import EngineError, checkpoint, recompute_all
from sac_policies.engines.contexts._containers import (
    Copies,
    content_of,
    is_opaque,
    is_same,
    parts_of,
)


def test_object_that_cannot_be_copied_is_refused_by_name():
    """The error says which argument, of what type, and the way out."""

    class Stubborn:
        def __init__(self) -> None:
            self.count = 0

        def __copy__(self):
            raise TypeError("no copies")

    def function(x, held):
        held.count += 1
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(function, x, Stubborn(), policy=recompute_all(), engine="contexts")
    with pytest.raises(
        EngineError,
        match=r"argument held of type Stubborn was changed by its region and cannot be copied "
        r"\(no copies\), but .* engine=\"recipe\"\.",
    ):
        out.sum().backward()


class _Kind(enum.Enum):
    ONE = 1


_Pair = namedtuple("_Pair", "first second")


def _reordered(**items):
    held = OrderedDict(items)
    held.move_to_end("a")
    return held


class _Cache(dict):
    """A dict that minds being written to, with attributes of its own."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")

    def clear(self) -> None:
        raise TypeError("read only")


class _Plain:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class _Slots:
    __slots__ = ("held",)


def _noted(*values: Any) -> dict[int, Any]:
    """Note what each of these holds now."""
    return {id(each): (each, content_of(each)) for each in values}


def _copies(containers: dict[int, Any], known: dict[int, Any] | None = None) -> Copies:
    return Copies(containers, {} if known is None else known, lambda value: "argument held")


@pytest.mark.parametrize(
    "value",
    [nn.Tanh(), int, len, lambda: 0, torch, _Kind.ONE, 3, "text", None, _Slots(), _Plain()],
    ids=str,
)
def test_value_that_stands_for_itself_is_opaque(value):
    """Modules, classes, functions, members; and what holds nothing that can be seen."""
    assert is_opaque(value)


@pytest.mark.parametrize(
    "value",
    [[], (), {}, set(), frozenset(), deque(), torch.ones(1), _Plain(held=1), _Cache()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_in_a_container_can_be_noted(value):
    """Empty ones may be filled; objects have what is in their namespace."""
    assert not is_opaque(value)


def test_notes_are_of_the_same_objects_only_in_the_same_places():
    """Equal ones are others, and so are the same ones in another order."""
    one, equal = [1], [1]
    held = [one, 2]
    before = content_of(held)
    assert is_same(before, content_of([one, 2]))
    assert not is_same(before, content_of([equal, 2]))
    assert not is_same(before, content_of([2, one]))
    assert not is_same(before, content_of([one]))


def test_note_of_a_dict_has_keys_values_and_attributes():
    """Each of them may change for itself."""
    cache = _Cache(a=1)
    before = content_of(cache)
    cache.seen = 0
    with_attribute = content_of(cache)
    dict.__setitem__(cache, "a", 2)
    assert before == (("a",), (1,), ())
    assert with_attribute == (("a",), (1,), ("seen", 0))
    assert content_of(cache) == (("a",), (2,), ("seen", 0))


def test_parts_are_named_as_one_would_write_them():
    """As they were noted, whatever has become of them."""
    cache, items, thing = _Cache(a=1), ["x", "y"], _Plain(keys=3)
    cache.seen = 2
    containers = _noted(cache, items, thing)
    items.clear()
    assert parts_of("held", cache, containers) == [("held['a']", 1), ("held.seen", 2)]
    assert parts_of("held", items, containers) == [("held[0]", "x"), ("held[1]", "y")]
    assert parts_of("held", thing, containers) == [("held.keys", 3)]
    assert parts_of("held", [1], containers) == []


def test_what_did_not_change_is_given_as_it_is():
    """Nor is it copied for another that did."""
    same, changed = [1], [2]
    containers = _noted(same, changed)
    changed.append(3)
    copies = _copies(containers)
    assert copies.of(same) is same
    assert copies.of(changed) == [2]
    assert copies.of(changed) is copies.of(changed) is not changed


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], lambda held: held.clear()),
        (lambda: {1, 2}, lambda held: held.add(3)),
        (lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
        (lambda: {"a": 1}, lambda held: held.update(b=2)),
        (lambda: OrderedDict(a=1, b=2), lambda held: held.update(c=3)),
        (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
        (lambda: _reordered(a=1, b=2), lambda held: held.update(c=3)),
        (lambda: defaultdict(list, a=1), lambda held: held["b"]),
        (lambda: _Cache(a=1), lambda held: dict.pop(held, "a")),
    ],
    ids=[
        *("list", "set", "deque", "dict", "OrderedDict", "reordered", "reordered before"),
        *("defaultdict", "subclass"),
    ],
)
def test_changed_container_is_given_again_as_it_was(make, change):
    """Of its own class, with all that makes it what it is; the changed one stays changed."""
    held, before = make(), make()
    containers = _noted(held)
    change(held)
    after = list(held)
    found = _copies(containers).of(held)
    assert type(found) is type(before)
    assert found == before
    assert list(found) == list(before)
    assert getattr(found, "maxlen", None) == getattr(before, "maxlen", None)
    assert getattr(found, "default_factory", None) == getattr(before, "default_factory", None)
    assert list(held) == after


def test_attributes_are_as_they_were():
    """Those that were added are gone, those that were taken are there."""
    thing = _Plain(seen=1, gone=2)
    containers = _noted(thing)
    thing.seen, thing.new = 5, 6
    del thing.gone
    assert vars(_copies(containers).of(thing)) == {"seen": 1, "gone": 2}


@pytest.mark.parametrize(
    ("around", "inner"),
    [
        (lambda held: (0, held), lambda found: found[1]),
        (lambda held: _Pair(0, held), lambda found: found.second),
        (lambda held: [[held]][0], lambda found: found[0]),
        (lambda held: {"a": held}, lambda found: found["a"]),
        (lambda held: _Plain(held=held), lambda found: found.held),
    ],
    ids=["tuple", "namedtuple", "list", "dict", "object"],
)
def test_what_holds_something_changed_is_copied_too(around, inner):
    """The copy holds the copy, also where the holder was noted before what it holds."""
    held = [1]
    holder = around(held)
    containers = _noted(holder, held)
    held.append(2)
    found = _copies(containers).of(holder)
    assert type(found) is type(holder)
    assert found is not holder
    assert inner(found) == [1]


def test_holders_of_holders_are_copied_and_nothing_else():
    """A change spreads to whatever holds it, and to nothing beside."""
    held, beside = [1], [9]
    middle = [held]
    outer = [middle, beside]
    containers = _noted(outer, middle, held, beside)
    held.append(2)
    found = _copies(containers).of(outer)
    assert found == [[[1]], [9]]
    assert found[1] is beside


def test_list_that_holds_itself_is_copied_once():
    """Its copy holds itself as well."""
    held: list[Any] = [1]
    held.append(held)
    containers = _noted(held)
    held.append(2)
    found = _copies(containers).of(held)
    assert found[0] == 1
    assert found[1] is found is not held
    assert len(found) == 2


def test_known_stand_ins_are_given_for_what_they_stand_for():
    """As tensors that are brought back; what holds them is copied."""
    tensor, other = torch.ones(1), torch.zeros(1)
    held = [tensor]
    found = _copies(_noted(held), {id(tensor): other}).of(held)
    assert found[0] is other
    assert held[0] is tensor
