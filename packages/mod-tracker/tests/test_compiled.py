"""Reports of models with compiled modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import (
    StateError,
    profile_flops,
    profile_memory,
    profile_time,
    trace,
    watch_memory,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # torch's own warning, when a compiled module gets the result of another operator
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(params=["in place", "in a wrapper"])
def model(request):
    """A model with one compiled block."""
    made = Model()
    if request.param == "in place":
        made.blocks[0].compile(backend="aot_eager")
    else:
        made.blocks[0] = torch.compile(made.blocks[0], backend="aot_eager")
    return made


@pytest.mark.parametrize(
    ("report_of", "missing"),
    [
        (profile_flops, "FLOPs in compiled code are not counted"),
        (profile_time, "its time includes that of its children"),
        (profile_memory, "bytes that compiled code allocates are missing"),
        (trace, "its time includes that of its children"),
    ],
)
def test_compiled_block_is_named_with_what_is_missing(report_of, missing, model, x):
    with report_of(model) as report:
        model(x).sum().backward()
    (note,) = report.notes
    assert note == f"compiled, so each is one row without its children: Model.blocks.0; {missing}"
    assert report.table().endswith(note)


def test_flops_around_compiled_code_are_counted(model, x):
    with profile_flops(model) as report:
        model(x).sum().backward()
    assert report.total == 2 * 3 * 64
    assert report["blocks.1.0"].total == report["head"].total == 3 * 64
    assert report.compiled == ("Model.blocks.0",)


def test_utilization_of_compiled_code_is_an_error(model, x):
    with profile_flops(model) as report:
        model(x)
    for share in (report.mfu, report.hfu):
        with pytest.raises(StateError, match=r"Model\.blocks\.0 ran compiled"):
            share(1e12, 1.0)


def test_page_on_memory_names_compiled_modules(model, x):
    with watch_memory(model) as watch:
        model(x).sum().backward()
        page = watch.page()
    note = "compiled, so each is one row without its children: Model.blocks.0; "
    assert page.notes[0].startswith(note)
    assert str(page).endswith(page.notes[0])


class Helped(nn.Module):
    """A module whose helper function is compiled."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.helper = torch.compile(lambda x, w: (x @ w).sin(), backend="aot_eager")

    def forward(self, x):
        return self.helper(x, self.weight)


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory])
def test_compiled_function_is_noted_with_its_module(report_of, x, fresh_compiler):
    """Its node stands for it in a backward."""
    model = nn.Sequential(Helped(), nn.Linear(4, 4))
    with report_of(model) as report:
        model(x).sum().backward()
    assert report.notes[0].startswith("compiled functions ran in Sequential.0; ")
    if report_of is profile_flops:
        with pytest.raises(StateError, match=r"Sequential\.0 ran compiled"):
            report.mfu(1e12, 1.0)


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory])
def test_products_that_compiled_code_calls_are_noted(report_of, x):
    """They write to given results, and torch.compile wrote the code that calls them."""
    written = {"async_compile": None, "torch": torch}
    exec("def call(a, b, out): torch.mm(a, b, out=out)", written)

    class Compiled(nn.Module):
        def forward(self, x):
            written["call"](x, torch.ones(4, 4), out := torch.empty(2, 4))
            return out

    with torch.no_grad(), report_of() as report:
        Compiled()(x)
    assert report.notes[0].startswith("compiled functions ran in Compiled; ")
    with torch.no_grad(), report_of() as report:
        torch.mm(x, torch.ones(4, 4), out=torch.empty(2, 4))
    assert report.notes == ()
