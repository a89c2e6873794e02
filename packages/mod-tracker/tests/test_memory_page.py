"""The memory page: its numbers and its text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mod_tracker import OptionError, watch_memory
from mod_tracker.reports._holders import Held
from mod_tracker.reports._memory_page import MemoryPage

from ._small import shows_saved


@shows_saved
def test_page_has_every_kind_of_memory(model_and_optimizer, train):
    """Bytes by kind and by module equal a calculation from the model's sizes."""
    model, optimizer = model_and_optimizer()
    x, parameters = torch.randn(4, 8), 2 * 2 * 8 * 32 * 4
    with watch_memory(model, optimizer=optimizer) as watch:
        train(model, optimizer, x)
        loss = model(x).sum()
        page = watch.page()
    kinds = page.by_kind()
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert kinds["optimizer"] == 2 * parameters + 4 * 4  # two moments, and a step count per tensor
    assert kinds["inputs"] == 4 * 8 * 4
    # Each block saves its tanh result, and the second block saves the first one's output.
    assert page.inside("saved")["Sequential.0"] == (4 * 32 + 4 * 8) * 4
    assert page.inside("saved")["Sequential.1"] == 4 * 32 * 4
    assert page.inside("parameters")["Sequential.0"] == parameters // 2
    assert page.total == sum(kinds.values()) == sum(held.size for held in page.held)
    assert page.by_module()["Sequential.0.up"]["gradients"] == 8 * 32 * 4
    assert loss.requires_grad


def test_page_as_text(model_and_optimizer, train):
    """One page; sections without rows are left out."""
    model, optimizer = model_and_optimizer()
    with watch_memory(model, optimizer=optimizer) as watch:
        train(model, optimizer, torch.randn(4, 8))
        lines = str(watch.page("asked by a test")).splitlines()
    assert lines[0] == "Who holds the memory: asked by a test"
    assert lines[1].endswith(", in step 1")
    assert "parameters, gradients, optimizer inside: to shard or offload" in lines
    assert "kept for backward inside: to checkpoint or offload" not in lines
    assert len(lines) < 60


def test_page_names_the_running_module(model_and_optimizer):
    """A page in the middle of a step has no later modules; a page between steps has all."""
    model, _ = model_and_optimizer()
    said = "written in forward of Sequential.1.up: what comes later in this step is not here"
    with watch_memory(model) as watch:
        within = []
        handle = model[1].up.register_forward_hook(lambda *_: within.append(watch.page()))
        loss = model(torch.randn(4, 8)).sum()
        handle.remove()
        after = watch.page()
    assert within[0].running == "forward of Sequential.1.up"
    assert str(within[0]).splitlines().count(said) == 1
    assert after.running == ""
    assert "written in" not in str(after)
    assert loss.requires_grad


def test_growth_since_the_step_before_is_on_the_page(model_and_optimizer, train):
    model, optimizer = model_and_optimizer()
    kept = []
    with watch_memory(model, optimizer=optimizer) as watch:
        for _ in range(3):
            train(model, optimizer, torch.randn(4, 8))
            kept.append(torch.zeros(999))
        page = watch.page()
    assert max(page.grown.values()) == 999 * 4
    assert min(page.grown.values()) > 0
    lines = str(page).splitlines()
    first = lines[lines.index("grew in the last step") + 1]
    assert first.split() == ["4", "kB", "(outside),", *first.split()[-1:]]
    assert first.split()[-1].startswith("test_memory_page.py:")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([4], "float32[4, 8]"),
        ([4, 4], "float32[4, 8]"),
        ([4, 4, 6], "float32[6, 8]; of the one before: float32[4, 8]"),
        ([4, 6, 6], "float32[6, 8]"),
    ],
)
def test_inputs_are_on_the_page(model_and_optimizer, train, sizes, said):
    model, optimizer = model_and_optimizer()
    with watch_memory(model, optimizer=optimizer) as watch:
        for size in sizes:
            train(model, optimizer, torch.randn(size, 8))
        page = watch.page()
    assert str(page).splitlines()[2] == f"inputs of the last step: {said}"


def test_tensors_alike_are_one_row():
    alike = [held(5, "saved", "Net", line="a.py:1") for _ in range(3)]
    other = [held(5, "saved", "Net", line="a.py:2"), held(12)]
    lines = str(page_of(*alike, *other)).splitlines()
    at = lines.index("largest tensors") + 1
    assert [line.split(maxsplit=2)[2] for line in lines[at : at + 3]] == [
        "3 x uint8[5] saved, Net, a.py:1",
        "uint8[12] temporaries, (outside), not seen made",
        "uint8[5] saved, Net, a.py:2",
    ]


def held(size, kind="temporaries", *stack, line="", phase=""):
    """A storage allocated by the innermost module of a stack."""
    return Held(size, kind, stack[-1] if stack else "", stack, phase, line, (size,), "uint8")


def page_of(*storages, grown=None):
    """A page about some storages."""
    return MemoryPage("asked", storages, grown or {}, 3)


def test_first_lines_name_largest_cause_and_growth():
    blocks = [held(7, "saved", "Net", "Net.0"), held(5, "saved", "Net", "Net.1")]
    page = page_of(
        *blocks, held(9, "inputs"), grown={("cpu", "Net", "a.py:1"): 4, ("cpu", "", "b.py:2"): 2}
    )
    assert str(page).split("\n\n")[0].splitlines()[2:] == [
        "most of it is activations: 21 B, 12 B of it inside Net",
        "grew by 6 B in a step, 4 B of it at Net, a.py:1",
    ]
    assert str(page_of(held(9, "inputs"))).splitlines()[2] == "most of it is activations: 9 B"


def test_tables_have_eight_rows_at_most():
    """The eight largest rows; sums are over all rows."""
    storages = [
        held(1000 - n, "saved", f"N{n}", line=f"a.py:{n}", phase="forward") for n in range(20)
    ]
    page = page_of(*storages, grown={("cpu", "", f"b.py:{n}"): n + 1 for n in range(20)})
    sections = str(page).split("\n\n")[1:]
    assert [len(section.splitlines()) for section in sections] == [2, 2, 9, 9, 9, 9]
    assert sections[3].splitlines()[1].split() == [
        *("1", "kB", "uint8[1000]", "saved,", "N0,", "forward", "a.py:0")
    ]
    assert sections[4].splitlines()[1].split() == ["20", "B", "(outside),", "b.py:19"]
    assert page.total == sum(1000 - n for n in range(20))


def test_each_device_has_a_page_of_its_own():
    """The accelerator comes first, and the text has both."""
    page = page_of(held(7, "saved", "Net"), replace(held(5, "saved", "Net"), device="cuda:0"))
    assert (page.device, page.devices, page.total) == ("cuda:0", ("cuda:0", "cpu"), 5)
    assert page.on("cpu").by_kind()["saved"] == page.on(torch.device("cpu")).total == 7
    text = str(page)
    assert "5 B in 1 storages on cuda:0" in text
    assert "7 B in 1 storages on cpu" in text
    with pytest.raises(OptionError, match="no memory is on cuda:1"):
        page.on("cuda:1")
