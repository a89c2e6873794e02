"""FLOPs inside compiled code, by the modules that the compiler's graphs name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mod_tracker import OptionError, backend_by_module, profile_flops, profile_time


class Block(nn.Module):
    """Two layers, and a product of its own between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) @ x.new_ones(8, 8)


class Model(nn.Module):
    """Blocks, of which the last is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)

    def forward(self, x):
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(x)


def step(model, rows=4):
    """Forward and backward."""
    model(torch.ones(rows, 8, requires_grad=True)).square().sum().backward()


def rows(report):
    """Own FLOPs by module and phase."""
    return {
        name: (row.self_forward, row.self_recompute, row.self_backward)
        for name, row in report.rows.items()
    }


def counted(model, steps=1, run=step):
    """The report of some steps, whose parts add up."""
    with profile_flops(model) as report:
        for _ in range(steps):
            run(model)
    assert report.total == report.sum("self_total")
    return report


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_model_has_the_flops_of_the_plain_one(fresh_compiler, backend, in_place):
    """By module and phase, in forward and backward, however it is compiled and as often."""
    model = Model()
    plain = counted(model, steps=6)
    if in_place:
        model.compile(backend=backend_by_module(backend))
        found = counted(model, steps=6)
    else:
        compiled = torch.compile(model, backend=backend_by_module(backend))
        found = counted(model, steps=6, run=lambda _: step(compiled))
    assert rows(found) == rows(plain)
    assert found.notes[-1].startswith("FLOPs inside compiled modules are by the compiler's graph")
    assert not any("seen as a whole" in note for note in found.notes)


# torch's own, as Dynamo looks at an input that another compiled part made.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_parts_that_share_their_code_are_told_apart(fresh_compiler):
    """What was compiled for the first is of the module that runs."""
    model = Model()
    plain = counted(model)
    for block in model.blocks:
        block.compile(backend=backend_by_module("aot_eager"))
    step(model)
    assert rows(counted(model)) == rows(plain)


def test_sizes_that_are_not_fixed_leave_it_whole(fresh_compiler):
    """All is of the compiled module then, and the report says so."""
    model = Model()
    model.compile(backend=backend_by_module("aot_eager"), dynamic=True)
    step(model)
    found = counted(model)
    assert list(found.rows) == ["Model"]
    assert found.total == counted(Model()).total
    assert found.notes[-1].startswith("compiled, and seen as a whole: Model;")


def test_formula_that_fails_leaves_it_whole(fresh_compiler):
    """Nobody can say then what a graph with that operator has; the backward has it not."""
    model = Model()
    model.compile(backend=backend_by_module("aot_eager"))
    with profile_flops(formulas={torch.ops.aten.tanh: lambda *_, **more: 1 / 0}) as report:
        step(model)
    assert report["Model"].self_forward == report["Model"].forward > 0
    assert report["Model.head"].backward == 2 * 2 * 4 * 8 * 2
    assert any("seen as a whole: Model;" in note for note in report.notes)


def test_what_a_checkpoint_around_it_runs_again_is_recompute(fresh_compiler):
    """Of the modules inside."""
    model, found = Model(), []
    for _ in range(2):
        found.append(
            counted(model, run=lambda m: step(lambda x: checkpoint(m, x, use_reentrant=False)))
        )
        model.compile(backend=backend_by_module("aot_eager"))
    plain, compiled = map(rows, found)
    assert plain.pop("Model.head") == (128, 0, 256)  # torch stops before what nothing needs
    assert compiled.pop("Model.head") == (128, 128, 256)
    assert compiled == plain


def test_compiled_bits_are_those_of_the_named_backend(fresh_compiler):
    """Gradients too, while a report counts."""
    torch.manual_seed(0)
    model, found = Model(), []
    for backend in ("inductor", backend_by_module("inductor")):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        with profile_flops():
            step(compiled)
        found.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_time_inside_is_of_the_whole(fresh_compiler):
    """A kernel may be of several modules."""
    model = Model()
    model.compile(backend=backend_by_module("aot_eager"))
    step(model)
    with profile_time(model) as report:
        step(model)
    assert list(report.rows) == ["Model"]
    assert any("seen as a whole" in note for note in report.notes)


def test_other_backends_are_refused():
    """As text."""
    with pytest.raises(OptionError) as error:
        backend_by_module("cudagraphs")
    assert str(error.value) == (
        "mod_tracker.backend_by_module: the backend 'cudagraphs' is not known, but the graphs of "
        'two are: "inductor" and "aot_eager". Give one of them.'
    )
