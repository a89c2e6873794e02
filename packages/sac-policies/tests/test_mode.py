"""What both modes of a region share: they look away where what runs is not the region's."""

from __future__ import annotations

import pytest
import torch

from sac_policies import context_fn
from sac_policies._torch_compat import RANGE_END, RANGE_START
from sac_policies.engines._engine_disabled import EngineDisabled, own_work
from sac_policies.engines.contexts._op_table import waiting

from ._contexts import PRODUCTS

MM = torch.ops.aten.mm.default
WITH_RANGES = pytest.mark.skipif(RANGE_START is None, reason="this torch has other ranges")


def _mm() -> None:
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def test_one_of_two_modes_recomputes():
    """Of one region, under one table."""
    forward, again = context_fn(PRODUCTS)()
    assert [forward.recomputes, again.recomputes] == [False, True]
    assert forward.region is again.region
    assert forward.op_table is again.op_table


def test_mode_waits_under_any_table_but_its_own():
    """While a recomputation runs inside it, and while the engine works."""
    for mode in context_fn(PRODUCTS)():
        assert not mode.waits
        for table in (waiting, EngineDisabled()):
            mode.op_table = table
            assert mode.waits
        mode.op_table = mode.own
        assert not mode.waits


@WITH_RANGES
def test_mode_looks_away_as_long_as_fsdp_works():
    """Its ranges nest with others; with the last of its own the region goes on."""
    mode, _ = context_fn(PRODUCTS)()
    seen = []
    steps = [
        (RANGE_START, ("ours",)),
        (RANGE_START, ("FSDP::pre_forward",)),
        (RANGE_START, ("inside",)),
        (RANGE_END, (None,)),
        (RANGE_END, (None,)),
        (RANGE_END, (None,)),
    ]
    for op, args in steps:
        mode.follow(op, args)
        seen.append(mode.waits)
    assert seen == [False, True, True, True, False, False]
    assert mode.op_table is mode.own


@WITH_RANGES
def test_operators_in_a_range_of_fsdp_are_not_counted():
    """Those before and after are; other ranges are no matter."""
    mode, _ = context_fn(PRODUCTS)()
    with mode:
        _mm()
        with torch.autograd.profiler.record_function("FSDP::all_gather"):
            _mm()
        with torch.autograd.profiler.record_function("ours"):
            _mm()
    assert mode.region.state.calls() == {MM: 2}


def test_operators_of_the_engine_are_not_counted():
    """The mode does as if it were not there, and is there again afterwards."""
    mode, _ = context_fn(PRODUCTS)()
    with mode:
        with own_work():
            _mm()
        _mm()
    assert mode.region.state.calls() == {MM: 1}
    assert len(mode.region.kept) == 1
