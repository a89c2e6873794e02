"""Traces: what can be chosen, what is fixed, JSON both ways."""

from __future__ import annotations

import re

import pytest

from sac_policies import BudgetError
from sac_policies.budget import Item, Trace, TracedOp, TracedPack


def op(name: str, out_bytes: int, cost: int, group: int, **more: bool) -> TracedOp:
    """An operator call with number 0."""
    return TracedOp(name, 0, out_bytes, cost, (), group, **more)


TRACE = Trace(
    "flops",
    ops=(
        op("aten.mm.default", 400, 9000, 0),
        op("aten.t.default", 0, 1, 1),
        op("aten.exp.default", 100, 50, 2),
        op("aten.bernoulli.default", 30, 3, 3),
        op("aten.rand_like.default", 20, 2, 3),
        op("aten.add.Tensor", 60, 6, 5, overwritten=True),
        op("aten.native_layer_norm.default", 88, 40, 6),
    ),
    packs=(
        TracedPack("MmBackward0", 0, 0, 400),
        TracedPack("MmBackward0", 0, 0, 400),
        TracedPack("", 2, 0, 100),
        TracedPack("SiluBackward0", 5, 0, 60),
        TracedPack("", -1, 0, 7777),
        TracedPack("NativeLayerNormBackward0", 6, 0, 80),
        TracedPack("", 6, 1, 4),
        TracedPack("", 6, 2, 4),
    ),
)


def test_eager_items_are_saved_storages_that_replay() -> None:
    """Each storage counts once; statistics of a norm do not hinder its output."""
    assert TRACE.items() == (Item((0,), 400, 9000), Item((6,), 80, 40))


def test_fixed_bytes_are_those_that_nothing_rebuilds() -> None:
    """Held outputs and statistics are fixed; inputs and overwritten storages do not count."""
    assert TRACE.fixed_bytes() == 100 + 4 + 4
    assert TRACE.total_bytes() == 108 + 480


def test_storage_with_one_reader_that_cannot_replay_is_fixed() -> None:
    """One saved alias that must be kept keeps the storage, whoever else could replay it."""
    packs = (TracedPack("MmBackward0", 0, 0, 400), TracedPack("", 0, 0, 400))
    trace = Trace("ns", (op("aten.mm.default", 400, 9, 0),), packs)
    assert trace.items() == ()
    assert trace.fixed_bytes() == 400


def test_compile_items_are_operators_that_make_a_value() -> None:
    """Views and overwritten values are no choice; random operators are one choice together."""
    items = TRACE.items("compile")
    assert [item.ops for item in items] == [(0,), (2,), (3, 4), (6,)]
    assert items[2] == Item((3, 4), 50, 5)
    assert TRACE.fixed_bytes("compile") == 0


def test_json_round_trip_is_exact() -> None:
    """Reading back gives an equal trace with an equal digest."""
    again = Trace.from_json(TRACE.to_json())
    assert again == TRACE
    assert again.digest == TRACE.digest


def test_digest_depends_on_operators_not_on_costs() -> None:
    """Ranks that measure other times hold the same digest; other operators change it."""
    slower = Trace(
        "flops", tuple(op(o.name, o.out_bytes, 1, o.group) for o in TRACE.ops), TRACE.packs
    )
    assert slower.digest == TRACE.digest
    assert Trace("flops", TRACE.ops[1:], TRACE.packs).digest != TRACE.digest


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON"), ("[]", "format None is read"), ('{"format": "x/2"}', "format 'x/2'")],
)
def test_unreadable_text_raises(text: str, reason: str) -> None:
    """Other text and other formats are refused by name."""
    with pytest.raises(BudgetError, match=reason):
        Trace.from_json(text)


def test_saved_values_that_the_region_was_given_are_nobodys_choice() -> None:
    """No replay in it rebuilds them, whatever node made them outside."""
    ops = (op("aten.mm.default", 400, 9, 0),)
    trace = Trace("ns", ops, (TracedPack("MmBackward0", -1, 0, 400),))
    assert trace.replayable == {}
    assert trace.items() == ()


@pytest.mark.parametrize(
    "problem",
    [
        (op("a", 1, 1, 0), op("b", 1, 1, 2)),
        (op("a", 1, 1, -1),),
        (op("a", -1, 1, 0),),
        (op("a", 1, -1, 0),),
        (TracedOp("a", -1, 1, 1, (), 0),),
        (TracedOp("a", 0, 1, 1, (0,), 0),),
        (op("a", 1, 1, 0), TracedOp("b", 0, 1, 1, (-1,), 1)),
        (TracedPack("", 0, 0, 1),),
        (op("a", 1, 1, 0), TracedPack("", 1, 0, 1)),
        (op("a", 1, 1, 0), TracedPack("", -2, 0, 1)),
        (op("a", 1, 1, 0), TracedPack("", 0, -1, 1)),
        (op("a", 1, 1, 0), TracedPack("", 0, 0, -1)),
    ],
)
def test_text_of_what_no_forward_does_is_refused(problem) -> None:
    """An operator of a later group or reading a later one, a tensor made by none, sizes below 0."""
    ops = tuple(each for each in problem if isinstance(each, TracedOp))
    packs = tuple(each for each in problem if isinstance(each, TracedPack))
    with pytest.raises(BudgetError, match=r"(operator|saved tensor) \d "):
        Trace.from_json(Trace("ns", ops, packs).to_json())


def test_text_of_the_smallest_numbers_is_read() -> None:
    """An operator of its own group that reads the one before, and an empty tensor."""
    ops = (op("a", 0, 0, 0), TracedOp("b", 0, 0, 0, (0,), 0))
    trace = Trace("ns", ops, (TracedPack("", 1, 0, 0), TracedPack("", -1, 0, 0)))
    assert Trace.from_json(trace.to_json()) == trace


def test_digest_is_sixteen_hexadecimal_digits() -> None:
    """As its documentation says, so that logs and file names can rely on it."""
    assert re.fullmatch("[0-9a-f]{16}", TRACE.digest)


@pytest.mark.parametrize("kind", [TracedOp, TracedPack, Item])
def test_one_for_each_operator_is_small(kind: type) -> None:
    """A trace has thousands of them: none carries a dictionary."""
    assert "__dict__" not in dir(kind)
