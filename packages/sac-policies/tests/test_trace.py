"""Traces: values that a plan can choose, and fixed values."""

from __future__ import annotations

import pytest

from sac_policies.budget import Item, Trace, TracedOp, TracedPack


def op(name: str, out_bytes: int, cost: int, **more: bool) -> TracedOp:
    """An operator call with number 0."""
    return TracedOp(name, 0, out_bytes, cost, (), **more)


TRACE = Trace(
    "flops",
    ops=(
        op("aten.mm.default", 400, 9000),
        op("aten.t.default", 0, 1),
        op("aten.exp.default", 100, 50),
        op("aten.bernoulli.default", 30, 3),
        op("aten.rand_like.default", 20, 2),
        op("aten.add.Tensor", 60, 6, overwritten=True),
        op("aten.native_layer_norm.default", 88, 40),
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
    """Each storage counts once; statistics of a norm do not exclude its output."""
    assert TRACE.items() == (Item(0, 400, 9000), Item(6, 80, 40))


def test_fixed_bytes_are_those_that_nothing_rebuilds() -> None:
    """Held outputs and statistics are fixed; inputs and overwritten storages do not count."""
    assert TRACE.fixed_bytes() == 100 + 4 + 4
    assert TRACE.total_bytes() == 108 + 480


def test_storage_with_one_reader_that_cannot_replay_is_fixed() -> None:
    """One saved alias that must be kept keeps the storage, even if others could be replayed."""
    packs = (TracedPack("MmBackward0", 0, 0, 400), TracedPack("", 0, 0, 400))
    trace = Trace("ns", (op("aten.mm.default", 400, 9),), packs)
    assert trace.items() == ()
    assert trace.fixed_bytes() == 400


def test_saved_values_that_the_region_was_given_are_nobodys_choice() -> None:
    """No replay in the region can recompute them."""
    ops = (op("aten.mm.default", 400, 9),)
    trace = Trace("ns", ops, (TracedPack("MmBackward0", -1, 0, 400),))
    assert trace.replayable == {}
    assert trace.items() == ()


@pytest.mark.parametrize("kind", [TracedOp, TracedPack, Item])
def test_one_for_each_operator_is_small(kind: type) -> None:
    """A trace has thousands of operators, so they have no `__dict__`."""
    assert "__dict__" not in dir(kind)
