"""mod-tracker on other libraries' models: bit-identical results, and torch's counts."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from _cases import each
from _checks import assert_same, assert_same_grads, shape_of, tensors_of, twins
from _models import Case
from _reports import REPORTS, names_of_calls, torchs_counter
from torch import nn

from ckpt_wrap import checkpoint_
from mod_tracker import ModTracker, profile_flops


def step(case: Case, model: nn.Module) -> torch.Tensor:
    """Run forward and backward; return the loss."""
    model.zero_grad()
    loss = case.loss(model)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("report", list(REPORTS))
@each
def test_no_bit_changes(case: Case, report: str) -> None:
    """Loss, gradients, buffers and the model are bit-identical inside each report."""
    model, plain = twins(case)
    before = shape_of(model)
    with REPORTS[report]():
        ours = step(case, model)
    assert torch.equal(ours, step(case, plain))
    assert_same_grads(model, plain)
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert shape_of(model) == before


@each
def test_flops_are_torchs(case: Case) -> None:
    """Totals of `profile_flops` equal `FlopCounterMode`'s; modules and outside add up to them."""
    model, plain = twins(case)
    with profile_flops() as report:
        step(case, model)
    with torchs_counter() as counter:
        step(case, plain)
    assert report.total == counter.get_total_flops()
    assert report.total == report.sum("self_total") > 0
    ours: Counter = Counter()
    for name, amount in report.by_operator.items():
        ours[name.rpartition(".")[0]] += amount  # torch counts by packet, not by overload
    theirs = {str(name): n for name, n in counter.get_flop_counts()["Global"].items() if n}
    assert {name: n for name, n in ours.items() if n} == theirs


@each
def test_recompute_is_counted_apart(case: Case) -> None:
    """With checkpointed blocks, forward and backward cost the same; the rest is recompute."""
    model, plain = twins(case)
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    totals = []
    for either in (model, plain):
        with profile_flops() as report:
            step(case, either)
        phases = [report.sum(f"self_{phase}") for phase in ("forward", "recompute", "backward")]
        totals.append(phases)
    ours, theirs = totals
    assert ours[0] == theirs[0]
    assert ours[2] == theirs[2]
    assert ours[1] > theirs[1] == 0
    with torchs_counter() as counter:
        step(case, model)
    assert counter.get_total_flops() == sum(ours)


@each
def test_modules_are_seen_as_hooks_see_them(case: Case) -> None:
    """Every module that a forward hook sees is entered as often, under its name."""
    model, _ = twins(case)
    seen, expected = names_of_calls(case, model)
    assert seen == expected


@each
def test_backward_is_attributed_to_blocks(case: Case) -> None:
    """Backward FLOPs of a block are at least its forward FLOPs."""
    model, _ = twins(case)
    names = [f"{type(model).__name__}.{name}" for name in case.blocks_of(model)]
    with profile_flops(model) as report:
        step(case, model)
    rows = [report[name] for name in names if report[name].forward]
    assert rows
    for row in rows:
        assert row.forward <= row.backward, row


@each
def test_a_step_that_fails_leaves_the_tracker_clean(case: Case) -> None:
    """A block raises inside each report; afterwards the model computes as before."""
    model, plain = twins(case)
    block = list(case.blocks_of(model).values())[-1]

    class Interrupted(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Interrupted

    for report in REPORTS.values():
        handle = block.register_forward_hook(fail)
        with report() as result, contextlib.suppress(Interrupted):
            step(case, model)
        handle.remove()
        if isinstance(result, ModTracker):
            assert (result.phase, result.stack) == ("outside", ())
    with torch.no_grad():
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            ours.copy_(theirs)
    assert torch.equal(step(case, model), step(case, plain))
    assert_same_grads(model, plain)
