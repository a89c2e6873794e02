"""What reports say of modules that ran compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import (
    ModTracker,
    profile_flops,
    profile_memory,
    profile_time,
    trace,
    watch_memory,
)
from mod_tracker.reports._compiled import compiled_modules, compiled_notes

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # torch's own, where what is compiled is given the result of something else
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def blocks(count):
    """A model of blocks of two layers."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)])


def compiled(model, way):
    """The model with its first block, or all of it, compiled; what is called."""
    if way == "part":
        model[0] = torch.compile(model[0], backend="aot_eager")
    elif way == "part in place":
        model[0].compile(backend="aot_eager")
    elif way == "whole":
        return torch.compile(model, backend="aot_eager")
    elif way == "whole in place":
        model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("not at all", []),
        ("part", ["Sequential.0"]),
        ("part in place", ["Sequential.0"]),
        ("whole", ["Sequential"]),
        ("whole in place", ["Sequential"]),
    ],
)
def test_what_runs_compiled_is_named_as_the_user_named_it(way, names, x):
    """Compiled by a function or in place; what was not called is not among them."""
    model, other = compiled(blocks(2), way), torch.compile(nn.ReLU())
    with ModTracker(other) as tracker:
        model(x).sum().backward()
    assert compiled_modules(tracker._attribution) == names
    assert bool(compiled_notes(tracker._attribution)) == bool(names)


REPORTS = [profile_time, profile_flops, profile_memory, trace, lambda: trace(memory=True)]


@pytest.mark.parametrize("report_of", REPORTS)
def test_every_report_says_what_it_has_seen_as_a_whole(report_of, x):
    """Below its table, and a report of memory says what is missing."""
    model = compiled(blocks(2), "part")
    with report_of() as report:
        model(x).sum().backward()
    (note,) = (note for note in report.notes if note.startswith("compiled"))
    assert note.startswith("compiled, and seen as a whole: Sequential.0; ")
    assert ("bytes that compiled code" in note) == (report_of in (profile_memory, REPORTS[-1]))
    assert report.table().endswith(note)
    assert report["Sequential"].name == "Sequential"


def test_page_on_memory_says_it_too(x):
    """At its end."""
    model = compiled(blocks(1), "whole")
    with watch_memory() as watch:
        model(x).sum().backward()
        page = watch.page()
    assert page.notes[0].startswith("compiled, and seen as a whole: Sequential; ")
    assert str(page).endswith(page.notes[0])


def test_parts_compiled_one_by_one_are_seen_each(x):
    """As the note says: each has its own numbers, and they are the plain model's."""
    found = {}
    for way in ("plain", "compiled"):
        model = blocks(5)
        if way == "compiled":
            for part in model:
                part.compile(backend="aot_eager")
        with profile_flops() as report:
            model(x).sum().backward()
        found[way] = {row.name: row.total for row in report if row.name.count(".") == 1}
    assert found["plain"] == found["compiled"]
    assert len(found["plain"]) == 5
    assert "Sequential.0, Sequential.1, Sequential.2 and 2 more; " in report.notes[-1]
