"""Reports of models with compiled modules."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

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


def test_compiled_block_is_named_with_what_is_missing(model, x):
    """In each report; FLOPs around it are counted, and a utilization is an error."""
    time = "its time includes that of its children"
    for report_of, missing in (
        (profile_flops, "FLOPs in compiled code are not counted"),
        (profile_time, time),
        (profile_memory, "bytes that compiled code allocates are missing"),
        (trace, time),
    ):
        with report_of(model) as report:
            model(x).sum().backward()
        compiled = "compiled, so each is one row without its children: Model.blocks.0; "
        assert report.notes[0] == compiled + missing
        assert report.notes[0] in report.table()
        if report_of is profile_flops:
            assert report.total == 2 * 3 * 64
            assert report["blocks.1.0"].total == report["head"].total == 3 * 64
            assert report.compiled == ("Model.blocks.0",)
            for share in (report.mfu, report.hfu):
                with pytest.raises(StateError, match=r"Model\.blocks\.0 ran compiled"):
                    share(1e12, 1.0)
    with watch_memory(model) as watch:
        model(x).sum().backward()
        page = watch.page()
    assert page.notes[0].startswith(compiled)
    assert str(page).endswith(page.notes[0])


class Helped(nn.Module):
    """A module whose helper function is compiled."""

    def __init__(self, backend):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.helper = torch.compile(lambda x, w: (x * w[:2]).sin(), backend=backend)

    def forward(self, x):
        return self.helper(x, self.weight)


REPORTS = (profile_flops, profile_memory, partial(trace, memory=True))


def check_notes(model, x):
    """Check that each report names the part that calls compiled code, in inference."""
    for report_of in REPORTS:
        with torch.no_grad(), report_of() as report:
            model(x)
        assert report.notes[0].startswith("compiled functions ran in Sequential.0; ")
    with torch.no_grad(), profile_flops() as report:
        model(x)
    with pytest.raises(StateError, match=r"Sequential\.0 ran compiled"):
        report.mfu(1e12, 1.0)


@pytest.mark.nightly
def test_function_of_the_inductor_is_noted_with_its_module(x):
    """Without products and in inference, when it is compiled and later."""
    from torch._inductor.output_code import CompiledFxGraph

    call = vars(CompiledFxGraph)["__call__"]
    check_notes(nn.Sequential(Helped("inductor"), nn.Linear(4, 4)), x)
    assert vars(CompiledFxGraph)["__call__"] is call


def test_compiled_code_is_noted_with_its_module(monkeypatch, x):
    """A class is patched inside a report only; here another class replaces the inductor's."""

    class CompiledFxGraph:
        def __call__(self, inputs):
            return inputs

    class Calls(nn.Module):
        def forward(self, x):
            return graph([x])[0]

    graph, call = CompiledFxGraph(), CompiledFxGraph.__call__
    loaded = SimpleNamespace(CompiledFxGraph=CompiledFxGraph)
    monkeypatch.setitem(sys.modules, "torch._inductor.output_code", loaded)
    check_notes(nn.Sequential(Calls(), nn.Linear(4, 4)), x)
    assert CompiledFxGraph.__call__ is call


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory])
def test_operators_of_other_backends_are_counted(report_of, x):
    """So there is nothing to note."""
    model = nn.Sequential(Helped("aot_eager"), nn.Linear(4, 4))
    model(x)
    with report_of(model) as report:
        model(x).sum().backward()
    assert "compiled" not in str(report.notes)
    if report_of is profile_memory:
        assert report["0"].allocated >= 2 * x.numel() * 4
