"""Properties over random module graphs: shared, reused, checkpointed, frozen, keyword inputs."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import ModTracker, profile_flops, profile_memory, profile_time, trace
from mod_tracker._record import Path, Record, outside

# torch warns about a reentrant checkpoint inside another one, which sees no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")

WIDTH, ROWS = 3, 2
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # operations of one matrix product of a layer

LEAVES = ("linear", "frozen", "tanh", "identity", "again")
INNER = ("chain", "residual", "keyword", "checkpoint", "reentrant", "dict")

plans = st.recursive(
    st.sampled_from(LEAVES),
    lambda inside: st.tuples(st.sampled_from(INNER), st.lists(inside, min_size=1, max_size=3)),
    max_leaves=8,
)


class Composite(nn.Module):
    """Runs its parts one after the other, in the way of its kind."""

    def __init__(self, kind, parts):
        super().__init__()
        self.kind, self.parts = kind, nn.ModuleList(parts)

    def chain(self, x):
        """Run the parts."""
        for part in self.parts:
            x = part(x=x) if getattr(part, "kind", None) == "keyword" else part(x)
        return x

    def forward(self, x):
        if self.kind == "residual":
            return x + self.chain(x)
        if self.kind in ("checkpoint", "reentrant"):
            # Without early stop a recompute is a whole forward, so calls can be counted.
            with set_checkpoint_early_stop(False):
                return checkpoint(self.chain, x, use_reentrant=self.kind == "reentrant")
        if self.kind == "dict":
            return {"y": self.chain(x)}["y"]
        return self.chain(x)


def build(plan, made):
    """Build a model; "again" reuses an earlier layer, so that it is shared."""
    if isinstance(plan, tuple):
        kind, inside = plan
        return Composite(kind, [build(part, made) for part in inside])
    if plan == "again" and made:
        return made[0]
    if plan in ("tanh", "identity"):
        return nn.Tanh() if plan == "tanh" else nn.Identity()
    layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(plan != "frozen")
    made.append(layer)
    return layer


def model_of(plan):
    """Return the model of a plan, under one root."""
    torch.manual_seed(0)
    return Composite("chain", [build(plan, [])])


def run(model):
    """Run one step; return the output and every gradient."""
    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).requires_grad_()
    output = model(x)
    output.sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    for parameter in model.parameters():
        parameter.grad = None
    return [output.detach(), *grads]


def count_calls(model):
    """Count calls of every layer in forward and backward, by hooks on the layers."""
    calls = {m: {False: 0, True: 0} for m in model.modules() if isinstance(m, nn.Linear)}
    tracker = ModTracker()
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args: calls[module].update(
                {tracker.is_bw: calls[module][tracker.is_bw] + 1}
            )
        )
        for layer in calls
    ]
    run(model)
    for handle in handles:
        handle.remove()
    return calls


law = settings(max_examples=60, deadline=None, derandomize=True, database=None)
some = settings(max_examples=20, deadline=None, derandomize=True, database=None)


@law
@given(plans)
def test_flops_are_conserved_and_each_layer_has_its_own(plan):
    model = model_of(plan)
    with FlopCounterMode(display=False) as counter:
        run(model)
    calls = count_calls(model)
    with profile_flops(model) as report:
        run(model)
    assert report.sum("self_total") == report.total == counter.get_total_flops()
    assert report.outside.total == 0
    names = {module: name for name, module in model.named_modules()}
    for layer, count in calls.items():
        row = report[f"Composite.{names[layer]}"]
        backwards = 2 if layer.weight.requires_grad else 1
        assert row.forward == PRODUCT * count[False]
        assert row.recompute == PRODUCT * count[True]
        assert row.backward == PRODUCT * count[False] * backwards


@law
@given(plans)
def test_a_tracker_with_all_hooks_changes_no_bit(plan):
    """Output and gradients are bit-identical, and every entered module is left."""
    model = model_of(plan)
    expected = run(model)
    tracker, open_now = ModTracker(), []
    tracker.register_user_hooks(
        lambda m, args: None,
        lambda m, args, output: None,
        lambda m, grads: open_now.append(m),
        lambda m, grads: open_now.remove(m),
    )
    with tracker:
        found = run(model)
    for old, new in zip(expected, found, strict=True):
        assert (old is None) == (new is None)
        assert old is None or torch.equal(old, new)
    assert open_now == []
    assert tracker.parents == {"Global"}


@law
@given(plans)
def test_bytes_and_times_are_conserved(plan):
    """Rows and outside add up to totals that are counted separately; results are bit-identical."""
    model = model_of(plan)
    expected = run(model)
    with profile_memory(model) as memory, profile_time() as times:
        found = run(model)
    for kind, total in memory.totals.items():
        assert memory.sum(f"self_{kind}") == total
    assert times.sum("self_total") == times.total
    assert all(
        torch.equal(old, new) for old, new in zip(expected, found, strict=True) if old is not None
    )


@some
@given(plans)
def test_traces_are_balanced_nested_and_in_order(plan):
    with trace(memory=False) as report:
        run(model_of(plan))
    opened, last = [], 0.0
    for event in json.loads(report.to_json())["traceEvents"]:
        assert event["ts"] >= last
        last = event["ts"]
        if event["ph"] == "B":
            opened.append((event["name"], event["cat"], event["args"]["call"]))
        else:
            assert opened.pop() == (event["name"], event["cat"], event["args"]["call"])
    assert opened == []


@some
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 20))
def test_record_finds_the_same_owners_as_a_list(widths, limit):
    """Lookups agree with a plain list of owners, for all kept intervals."""
    record, base = Record(limit=limit), outside()
    owners, number = [], 0
    for index, width in enumerate(widths):
        call = (Path(lambda: None, parent=base[0], name=str(index)), 0, base)
        record.close(number, number + width, call)
        owners += [call] * width
        number += width
    assert len(record) <= limit
    known = [record.find(n) for n in range(number)]
    kept = sum(found[2] is not None for found in known)
    assert known[number - kept :] == owners[number - kept :]
    assert len({call[0].name for call in known[number - kept :]}) == len(record)
