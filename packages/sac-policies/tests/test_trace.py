"""Traces: what can be chosen, what is fixed, JSON both ways."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from sac_policies import BudgetError, Item, Trace, TracedOp, TracedPack


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


def test_recipe_chooses_among_saved_storages_that_replay() -> None:
    """Each storage counts once; statistics of a norm do not hinder its output."""
    assert TRACE.items() == (Item((0,), 400, 9000), Item((6,), 80, 40))


def test_recipe_keeps_what_nothing_rebuilds() -> None:
    """Outputs without rule, overwritten storages and statistics are fixed; inputs are not ours."""
    assert TRACE.fixed_bytes() == 100 + 60 + 4 + 4
    assert TRACE.total_bytes() == 168 + 480


def test_storage_with_one_reader_that_cannot_replay_is_fixed() -> None:
    """One saved alias that must be kept keeps the storage, whoever else could replay it."""
    packs = (TracedPack("MmBackward0", 0, 0, 400), TracedPack("", 0, 0, 400))
    trace = Trace("ns", (op("aten.mm.default", 400, 9, 0),), packs)
    assert trace.items() == ()
    assert trace.fixed_bytes() == 400


def test_contexts_chooses_among_operators_that_make_a_value() -> None:
    """Views and overwritten values are no choice; random operators are one choice together."""
    items = TRACE.items("contexts")
    assert [item.ops for item in items] == [(0,), (2,), (3, 4), (6,)]
    assert items[2] == Item((3, 4), 50, 5)
    assert TRACE.fixed_bytes("contexts") == 0


def test_json_round_trip_is_exact() -> None:
    """Reading back gives an equal trace with an equal digest."""
    again = Trace.from_json(TRACE.to_json())
    assert again == TRACE
    assert again.digest == TRACE.digest


WITHOUT = replace(
    TRACE,
    packs=(*TRACE.packs[:3], TracedPack("", 5, 0, 60), *TRACE.packs[4:], TracedPack("", 1, 0, 32)),
    sees_calls=False,
)
BOTH = replace(TRACE, unseen=WITHOUT.packs, calls_cost=7)


def test_forward_without_calls_is_a_trace_of_its_own() -> None:
    """Only there it costs nothing to see them; shares are of what keeps the most."""
    assert TRACE.without_calls is None
    assert BOTH.without_calls == WITHOUT
    assert BOTH.items() == TRACE.items()
    assert BOTH.fixed_bytes() == TRACE.fixed_bytes()
    assert BOTH.total_bytes() == WITHOUT.total_bytes() == TRACE.total_bytes() + 32
    assert BOTH.total_bytes("contexts") == TRACE.total_bytes("contexts")
    assert BOTH.digest == TRACE.digest


@pytest.mark.parametrize("trace", [BOTH, WITHOUT])
def test_json_tells_whether_calls_are_seen(trace: Trace) -> None:
    """And what was written before there was a choice is read as it was meant."""
    assert Trace.from_json(trace.to_json()) == trace
    old = json.loads(TRACE.to_json())
    for name in ("unseen", "calls_cost", "sees_calls"):
        del old[name]
    assert Trace.from_json(json.dumps(old)) == TRACE


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"calls_cost": -1}, "its calls cost -1"),
        ({"calls_cost": "1"}, "calls_cost is '1'"),
        ({"sees_calls": 1}, "sees_calls is 1"),
        ({"unseen": 1}, "1 is not a list of objects"),
        ({"unseen": [{"producer": ""}]}, "lacks 'made_by'"),
    ],
)
def test_text_that_sees_what_cannot_be_is_refused(changed: dict[str, Any], said: str) -> None:
    """No time below none, no number for yes, no tensors that are none."""
    text = json.dumps(json.loads(BOTH.to_json()) | changed)
    with pytest.raises(BudgetError, match=re.escape(said)):
        Trace.from_json(text)


def test_unseen_tensor_that_nothing_made_is_refused() -> None:
    """It is told of with a number after those that are seen."""
    damaged = replace(BOTH, unseen=(TracedPack("", 99, 0, 1),))
    with pytest.raises(BudgetError, match=f"saved tensor {len(TRACE.packs)} is made by"):
        Trace.from_json(damaged.to_json())


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
