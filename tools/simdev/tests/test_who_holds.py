"""The device runs out of memory under mod-tracker's `watch_memory`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import watch_memory


def test_page_is_written_where_the_devices_memory_runs_out(sim, device):
    """A batch eight times as large: inputs, kinds and modules are on the page."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*blocks).to(device)

    def step(rows):
        model(torch.ones(rows, 64, device=device)).sum().backward()
        model.zero_grad()

    step(128)
    sim.empty_cache()
    sim.limit(sim.memory()["reserved"] + 24 * 2**20)
    with pytest.raises(torch.OutOfMemoryError) as error, watch_memory(model) as watch:
        for rows in (128, 128, 4096):
            step(rows)
    assert error.value.__traceback__ is not None  # the traceback holds forward's tensors
    sim.limit(None)
    (page,) = watch.pages
    lines = str(page).splitlines()
    assert lines[0] == "Who holds the memory: memory ran out (OutOfMemoryError)"
    assert lines[2] == (
        "inputs of the last step: float32[4096, 64]; of the one before: float32[128, 64]"
    )
    kinds = page.by_kind()
    assert kinds["saved"] > kinds["parameters"] > 0
    assert next(iter(page.inside("saved"))) == "Sequential"
    assert any("test_who_holds.py" in line for line in lines)
