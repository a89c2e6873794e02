"""Reports of runs that go on: steps alike, who holds the memory, and what grows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import MLP, leaf, step


@requirement(
    "MT-251",
    level="MUST",
    text=(
        "FLOPs of steps that are alike MUST be the same for each, however many there are and "
        "whatever fused kernels do inside."
    ),
    rationale="a report that looks at some steps only must not count some steps only",
    since="0.1.0",
    profile="reports",
    group="counting",
)
@pytest.mark.parametrize("fused", [False, True])
def test_flops_of_steps_alike(part, device, fused):
    """As many times those of one."""
    torch.manual_seed(0)
    model, x = MLP(device), leaf(device)
    if fused:
        model = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).to(device).eval()
        x = torch.randn(2, 6, 16, device=device)

    def run():
        if fused:
            with torch.inference_mode():
                model(x)
        else:
            step(model, x)

    totals = []
    for times in (1, 7):
        with part.profile_flops() as report:
            for _ in range(times):
                run()
        totals.append(report.total)
    assert totals[0] > 0
    assert totals[1] == 7 * totals[0]


@requirement(
    "MT-252",
    level="MUST",
    text=(
        "Memory that is alive MUST be told by module and by what it is held as, each storage "
        "once, and MUST be found when memory runs out."
    ),
    rationale="reproduced: nobody says who holds what when memory runs out",
    since="0.1.0",
    profile="reports",
    group="holding",
)
def test_who_holds_the_memory(part, device):
    """By kind and module, and once more when memory runs out."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device), leaf(device)
    with part.watch_memory(model) as watch:
        model(x).sum().backward()
        output = model(x)
        page = watch.page()
    kinds, parameters = page.by_kind(), 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert kinds["inputs"] == 4 * x.numel()
    assert page.inside("saved").get("Sequential.1") == 4 * len(x) * 8
    assert page.total == sum(kinds.values()) == sum(held.size for held in page.held)
    with pytest.raises(MemoryError), part.watch_memory(model) as watch:
        output = model(x)
        raise MemoryError
    assert watch.pages[0].inside("saved").get("Sequential.1") == 4 * len(x) * 8
    assert output.requires_grad


@requirement(
    "MT-253",
    level="MUST",
    text=(
        "A step that leaves more memory behind each time MUST be found, with the module that "
        "made it, and one that does not MUST pass."
    ),
    rationale="a leak ends a run after days",
    since="0.1.0",
    profile="reports",
    group="holding",
)
@pytest.mark.parametrize("leaks", [False, True])
def test_growth_is_found(part, device, leaks):
    """A loss that is kept keeps its graph."""
    model, kept = MLP(device), []

    def run():
        model.zero_grad()
        loss = model(leaf(device)).sum()
        loss.backward()
        if leaks:
            kept.append(model(leaf(device)).sum())

    if leaks:
        with pytest.raises(AssertionError, match=r"a step  MLP"):
            part.assert_no_growth(run)
    else:
        part.assert_no_growth(run)


def _changes_what_was_saved(measure, device):
    x = leaf(device)
    with pytest.raises(RuntimeError), measure():
        y = x.exp()
        y.add_(1)
        y.sum().backward()


@requirement(
    "MT-254",
    level="MUST",
    text=(
        "Measuring memory MUST NOT hide that a tensor was changed in place after it was saved "
        "for backward."
    ),
    rationale="hooks for saved tensors turn torch's own check off",
    since="0.1.0",
    profile="reports",
    group="watching",
)
def test_measured_change_after_saving_is_an_error(part, device):
    """As without anybody measuring."""
    _changes_what_was_saved(part.profile_memory, device)


@requirement(
    "MT-421",
    level="MUST",
    text=(
        "Looking who holds memory MUST NOT hide that a tensor was changed in place after it was"
        " saved for backward."
    ),
    rationale="hooks for saved tensors turn torch's own check off",
    since="0.1.0",
    profile="reports",
    group="holding",
)
def test_watched_change_after_saving_is_an_error(part, device):
    """As without anybody watching."""
    _changes_what_was_saved(part.watch_memory, device)


@requirement(
    "MT-413",
    level="MUST",
    text=(
        "What a forward made that nobody goes back through MUST be let go of as without a "
        "measurement, at once."
    ),
    rationale=(
        "reproduced: a node and its own result, which it saves, held each other under hooks, so"
        " that a batch which failed kept its memory"
    ),
    since="0.1.0",
    profile="reports",
    group="holding",
)
@pytest.mark.parametrize("name", ["profile_memory", "watch_memory"])
def test_what_nobody_goes_back_through_is_let_go_of(part, device, name):
    """Without a collection of garbage."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).to(device), leaf(device)
    gc.collect()
    gc.disable()
    try:
        with getattr(part, name)(model):
            output = model(x)
            storage = weakref.ref(output.untyped_storage())
            del output
            assert storage() is None
    finally:
        gc.enable()


@requirement(
    "MT-414",
    level="MUST",
    text=(
        "Where memory runs out in a model and the caller goes on, there MUST be one page of "
        "what was held then."
    ),
    rationale="loops that leave out a batch which is too large are where the question comes up",
    since="0.1.0",
    profile="reports",
    group="holding",
)
def test_error_that_is_caught_has_a_page(part, device):
    """One for each time that memory ran out."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Identity()).to(device), leaf(device)

    def fail(module, args):
        raise MemoryError

    with part.watch_memory(model) as watch:
        for _ in range(2):
            gc.collect()
            model(x).sum().backward()
            handle = model[2].register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                model(x)
            handle.remove()
    saved = [page.inside("saved").get("Sequential.1") for page in watch.pages]
    assert saved == [4 * len(x) * 8] * 2


class _Blocks(nn.Module):
    """A layer, and two that `call` calls, which is given them and what they are called with."""

    def __init__(self, call):
        super().__init__()
        self.first, self.block = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.call = call

    def forward(self, x):
        return self.call(self.block, self.first(x))


@requirement(
    "MT-424",
    level="MUST",
    text=(
        "What a checkpoint keeps in the place of saved tensors, its inputs and what a policy "
        "has it keep, MUST be told apart from what autograd keeps and from what nothing keeps."
    ),
    rationale=(
        "reproduced: values kept by torch's selective checkpointing were temporaries, which "
        "looks like a leak"
    ),
    since="0.1.0",
    profile="reports",
    group="holding",
)
@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant", "selective"])
def test_what_a_checkpoint_keeps(part, device, kind):
    """Its input, and the products where a policy says so."""
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        products = [torch.ops.aten.addmm.default]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(products)

    def call(block, given):
        return block(given) if kind == "none" else checkpoint(block, given, **options)

    model, x = _Blocks(call).to(device), leaf(device)
    with part.watch_memory(model) as watch:
        output = model(x)
        page = watch.page()
    given, hidden = 4 * len(x) * 6, 4 * len(x) * 8
    inside = {
        kept: sorted(held.size for held in page.held if held.kind == kept and held.module)
        for kept in ("saved", "checkpoint")
    }
    keeps = {"none": [], "selective": [given, hidden]}.get(kind, [given])
    assert inside["saved"] == ([given, hidden] if kind == "none" else [])
    assert [size for size in inside["checkpoint"] if size in (given, hidden)] == keeps
    assert output.requires_grad
