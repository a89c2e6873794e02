"""What a plan for a memory budget promises, checked to the byte."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity

from torchparts_conformance import requirement

MIB = 2**20


class Stack(nn.Module):
    """Gated layers with residuals, a norm, and a buffer that training changes."""

    def __init__(self, width=32, layers=3):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        """Add each layer to what it reads; (rows, width) in and out."""
        x = self.norm(x)
        for up, down in zip(self.up, self.down, strict=True):
            gate, value = up(F.layer_norm(x, x.shape[-1:])).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * value)
        return F.dropout(x, 0.1)


def stack(device, rows=256):
    """A seeded stack and its input."""
    torch.manual_seed(0)
    with torch.device(device):
        return Stack(), torch.randn(rows, 32)


def profiled(part, device):
    """A stack, its input and the trace of one forward, in counted work."""
    model, x = stack(device)
    return model, x, part.profile(model, x, unit="flops")


def budgets(part, trace, count=9):
    """Budgets from the smallest that has a plan to everything kept."""
    low = part.solve(trace, 0).smallest_bytes
    high = part.solve(trace, "100%").kept_bytes
    return [low + (high - low) * step // (count - 1) for step in range(count)]


def kept_bytes(part, model, x, plan):
    """Bytes of the storages, leaves and inputs apart, that hooks around the region are given."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = part.checkpoint(model, x, policy=plan)
    given = [*model.parameters(), *model.buffers(), x]
    for tensor in given:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    return sum(sizes.values())


def grown(step, device):
    """Most bytes that a step adds to what is allocated, by the allocator's own count."""
    if device != "cpu":
        accelerator = torch.get_device_module(device)
        accelerator.synchronize()
        before = accelerator.memory_allocated()
        accelerator.reset_peak_memory_stats()
        step()
        accelerator.synchronize()
        return accelerator.max_memory_allocated() - before
    return max(itertools.accumulate(_changes(step), initial=0))


def left(forward, device):
    """Bytes that a forward leaves allocated, its output included, by the allocator's own count."""
    if device != "cpu":
        accelerator = torch.get_device_module(device)
        before = accelerator.memory_allocated()
        out = forward()
        return accelerator.memory_allocated() - before if out is not None else None
    held = []
    return sum(_changes(lambda: held.append(forward())))


def _changes(step):
    """What each allocation and release on the CPU adds, in bytes, in order."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    return [event["args"]["Bytes"] for event in memory]


@requirement(
    "SP-120",
    level="MUST",
    text="Profiling fake tensors MUST give the bytes of real ones.",
    rationale="a dry run is how a plan is made for a machine that is not there",
    since="0.1.0",
    profile="budget",
)
def test_dry_run_gives_the_bytes_of_a_real_one(part, device):
    """Every operator and every saved tensor, without memory."""
    _, _, real = profiled(part, device)
    with FakeTensorMode():
        _, _, fake = profiled(part, device)
    assert [op.out_bytes for op in fake.ops] == [op.out_bytes for op in real.ops]
    assert [pack.storage_bytes for pack in fake.packs] == [p.storage_bytes for p in real.packs]


@requirement(
    "SP-121",
    level="MUST",
    text="A plan MUST NOT keep more bytes than its budget.",
    rationale="pytorch#197871: torch's solvers overshoot by up to 5.6%",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("backend", ["eager", "compile"])
def test_plan_is_within_its_budget(part, device, backend):
    """A hundred budgets over one trace."""
    _, _, trace = profiled(part, device)
    high = part.solve(trace, "100%", backend=backend).kept_bytes
    for seed in range(100):
        budget = random.Random(seed).randrange(high + 1)
        plan = part.solve(trace, budget, backend=backend)
        assert not plan or plan.kept_bytes <= budget


@requirement(
    "SP-122",
    level="MUST",
    text="The bytes a region hands to the hooks around it under a plan MUST be exactly the plan's.",
    rationale="an estimate cannot be a promise",
    since="0.1.0",
    profile="budget",
)
def test_region_keeps_the_bytes_of_its_plan(part, device):
    """What the hooks receive is what the plan says, at nine budgets."""
    model, x, trace = profiled(part, device)
    for budget in budgets(part, trace):
        plan = part.solve(trace, budget)
        assert kept_bytes(part, model, x, plan) == plan.kept_bytes


@requirement(
    "SP-123",
    level="MUST",
    text="A budget without a plan MUST give a false value that says the smallest budget with one.",
    rationale="an infeasible plan is a value",
    since="0.1.0",
    profile="budget",
)
def test_budget_without_plan_is_a_false_value(part, device):
    """It says the smallest budget with a plan: that has one, a byte less has none."""
    _, _, trace = profiled(part, device)
    nothing = part.solve(trace, 0)
    assert not nothing
    assert part.solve(trace, nothing.smallest_bytes)
    assert not part.solve(trace, nothing.smallest_bytes - 1)


@requirement(
    "SP-124",
    level="MUST",
    text="A larger budget MUST NOT repeat more work.",
    rationale="pytorch#197838: the peak at 0.05 was 4.17 times that at 0.15",
    since="0.1.0",
    profile="budget",
)
def test_larger_budget_repeats_no_more(part, device):
    """Work repeated falls to nothing."""
    _, _, trace = profiled(part, device)
    costs = [part.solve(trace, budget).recompute_cost for budget in budgets(part, trace, 33)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] == 0


@requirement(
    "SP-125",
    level="MUST",
    text=(
        "On a small trace the work repeated MUST be the least that any choice within the budget"
        " repeats."
    ),
    rationale="exactness at small sizes is cheap to demand",
    since="0.1.0",
    profile="budget",
)
def test_small_trace_is_solved_exactly(part, device):
    """All subsets of the choices are tried."""
    w = torch.randn(16, 16, device=device, requires_grad=True)
    function = lambda x: F.silu(F.gelu(x @ w) @ w[:, :5]).sin() * 2  # noqa: E731 - one expression
    trace = part.profile(function, w, unit="flops")
    items = trace.items()
    low, high = trace.fixed_bytes(), trace.total_bytes()
    for budget in range(low, high + 1, 97):
        fitting = (
            sum(item.cost for item in items) - sum(item.cost for item in chosen)
            for count in range(len(items) + 1)
            for chosen in itertools.combinations(items, count)
            if low + sum(item.kept_bytes for item in chosen) <= budget
        )
        assert part.solve(trace, budget).recompute_cost == min(fitting)


@requirement(
    "SP-126",
    level="MUST",
    text="A budget that does not parse MUST raise a ValueError that quotes it.",
    rationale="a size without unit is the commonest slip",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("budget", ["6 gigs", "lots", "101%", -1, 1.5])
def test_unreadable_budget_is_quoted(part, device, budget):
    """In a ValueError."""
    _, _, trace = profiled(part, device)
    with pytest.raises(ValueError, match=str(budget)):
        part.solve(trace, budget)


@requirement(
    "SP-127",
    level="MUST",
    text="A Pareto front MUST list no plan that another beats, and survive JSON.",
    rationale="torch offers a picture only",
    since="0.1.0",
    profile="budget",
)
def test_front_lists_what_nothing_beats(part, device):
    """Bytes rise while work falls, strictly; JSON gives the same list."""
    _, _, trace = profiled(part, device)
    front = part.pareto(trace)
    assert len(front) > 3
    for less, more in itertools.pairwise(front):
        assert less.bytes < more.bytes
        assert less.seconds > more.seconds
    assert part.pareto_from_json(part.pareto_to_json(front)) == front


@requirement(
    "SP-128",
    level="MUST",
    text=(
        "A step under the plan of `fit` MUST NOT take more memory than the budget, by the "
        "allocator's own count."
    ),
    rationale="no other implementation closes the loop on a measurement",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_step_takes_no_more_than_its_budget(part, device, share):
    """The allocator is asked, for the step that the fitted plan is for."""
    model, x = stack(device, rows=1024)
    found = part.fit(model, x, share, loss=torch.sum)
    if not found:
        assert found.smallest_bytes > found.budget_bytes
        return
    resident = [*model.parameters(), *model.buffers(), x]
    held = sum(tensor.untyped_storage().nbytes() for tensor in resident)
    step = lambda: part.checkpoint(model, x, policy=found.policy).sum().backward()  # noqa: E731 - one call
    assert held + grown(step, device) <= found.budget_bytes


@requirement(
    "SP-130",
    level="MUST",
    text="`fit` MUST leave gradients, buffers and random state as they were.",
    rationale="measuring is not training",
    since="0.1.0",
    profile="budget",
)
def test_fitting_is_not_training(part, device):
    """Gradients are the same tensors with the same values; so is all other state."""
    model, x = stack(device)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    before = [t.clone() for t in (*grads, *model.buffers(), torch.get_rng_state())]
    part.fit(model, x, 0.9)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    after = (*grads, *model.buffers(), torch.get_rng_state())
    assert all(map(torch.equal, before, after))


@requirement(
    "SP-131",
    level="MUST",
    text="A plan MUST survive JSON with an equal digest.",
    rationale="ranks compare plans by digest",
    since="0.1.0",
    profile="budget",
)
def test_plan_survives_json(part, device):
    """Equal plan, equal digest; another budget, another digest."""
    _, _, trace = profiled(part, device)
    few, many = (part.solve(trace, budget) for budget in budgets(part, trace, 3)[1:])
    again = part.from_json(part.to_json(few))
    assert again == few
    assert again.digest == few.digest != many.digest


@requirement(
    "SP-150",
    level="MUST",
    text=(
        "`checkpoint` MUST follow a plan whether or not the blocks it is used on have inputs "
        "that need gradients."
    ),
    rationale="a plan made for the first block of a stack is used for all of them",
    since="0.1.0",
    profile="budget",
)
def test_plan_of_one_block_is_followed_by_all(part, device):
    """The first block's input needs no gradient, the others' do; all gradients are plain ones."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)]
        x = torch.randn(4, 8)
    plan = part.solve(part.profile(blocks[0], x), 1.0)
    found = []
    for call in (lambda b, y: b(y), lambda b, y: part.checkpoint(b, y, policy=plan)):
        y = x
        for block in blocks:
            y = call(block, y)
        found.append(torch.autograd.grad(y.sum(), [p for b in blocks for p in b.parameters()]))
    assert all(map(torch.equal, *found))


@requirement(
    "SP-151",
    level="MUST",
    text="Damaged text MUST be refused by the reader of policies, with a ValueError.",
    rationale="a plan file that was cut or edited is found when it is read, not in training",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize(
    ("old", "new"),
    [('"save"', "NaN"), ('["aten.mm"]', '"aten.mm"'), ('"answer"', '"colour"'), ("{", "[" * 9999)],
    ids=["number", "text", "word", "depth"],  # some versions of pytest spell out all of it
)
def test_damaged_policy_is_refused(part, device, old, new):
    """As text it may parse; as a policy it does not."""
    text = part.to_json(part.save_ops("aten.mm"))
    assert old in text
    with pytest.raises(ValueError, match=r"."):
        part.from_json(text.replace(old, new))


@requirement(
    "SP-152",
    level="MUST",
    text=(
        "An operator entry that matches nothing MUST be warned of for each model, not once for "
        "each policy value."
    ),
    rationale="whoever trains a second model is not to rely on the warning of the first",
    since="0.1.0",
    profile="budget",
)
def test_second_model_is_warned_of(part, device):
    """Both lack the operator; each is told of it."""
    x = torch.ones(2, 4, device=device, requires_grad=True)
    for kind in (nn.Sigmoid, nn.Tanh):
        with pytest.warns(UserWarning, match=r"aten\.atan2"):
            part.checkpoint(kind(), x, policy=part.save_ops("aten.atan2"))


def _held_bytes(part, model, x, policy):
    """What a forward allocates and does not release while only its graph lives."""
    alive = []

    def step():
        out = part.checkpoint(model, x, policy=policy, preserve_rng_state=False)
        alive.append(out.grad_fn)

    step()  # what is made once and stays is not the region's
    alive.clear()
    return sum(_changes(step))


@requirement(
    "SP-156",
    level="MUST",
    text=(
        "The `held_bytes` of a `report` MUST be what `checkpoint` holds until backward for the "
        "same call, and the sum over its rows."
    ),
    rationale="a report counted 221,184 bytes where 782,912 were held",
    since="0.1.0",
    profile="budget",
    devices=("cpu",),
)
@pytest.mark.parametrize("kind", ["products", "nothing", "plan"])
def test_report_counts_what_is_held(part, kind):
    """By the allocator's own count."""
    model, x, trace = profiled(part, "cpu")
    if kind == "plan":
        policy = part.solve(trace, "50%")
    else:
        policy = {"products": part.save_ops("aten.mm"), "nothing": part.recompute_all()}[kind]
    said = part.report(model, x, policy=policy)
    assert said.held_bytes == sum(row.held_bytes for row in said.rows)
    assert said.held_bytes == _held_bytes(part, model, x, policy)


@requirement(
    "SP-177",
    level="MUST",
    text=(
        "A plan that may offload MUST keep no more than its budget on the device, and MUST cost"
        " no more than one that keeps the same and offloads a value exactly where copying it to"
        " the host and back takes less time than making it again."
    ),
    rationale=(
        "with two choices a budget below what products take is paid with products that run "
        "twice, while the host's memory is empty"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_offloading_costs_no_more_than_where_copies_are_faster(part, device, share):
    """At a rate at which half of the values are copied faster than they are made again."""
    model, x = stack(device)
    trace = part.profile(model, x, unit="ns", repeats=3)
    items = trace.items()
    rates = sorted(2 * item.kept_bytes * 10**9 / max(1, item.cost) for item in items)
    rate = max(1, int(rates[len(rates) // 2]))
    fixed = part.solve(trace, 0).smallest_bytes
    budget = max(fixed, int(share * trace.total_bytes()))
    plan = part.solve(trace, budget, host_bandwidth=rate)
    decided = dict(plan.choices)
    kept, spent, moved = fixed, 0, 0
    for item in items:
        decision = decided.get(trace.ops[item.ops[0]].key, part.Decision.RECOMPUTE)
        if decision is part.Decision.SAVE:
            kept += item.kept_bytes
            continue
        spent += min(item.cost, 2 * item.kept_bytes * 10**9 / rate)
        moved += item.kept_bytes * (decision is part.Decision.OFFLOAD)
    assert kept == plan.kept_bytes <= budget
    assert moved == plan.offloaded_bytes
    assert plan.recompute_cost <= spent + 2 * len(items)
