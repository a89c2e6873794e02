"""One page on who holds the memory: its numbers, and its text."""

from __future__ import annotations

import torch

from mod_tracker import watch_memory


def test_page_has_every_kind_of_memory(model_and_optimizer, train):
    """Bytes by kind and by module, from the sizes of the model."""
    model, optimizer = model_and_optimizer()
    x, parameters = torch.randn(4, 8), 2 * 2 * 8 * 32 * 4
    with watch_memory(model, optimizer=optimizer) as watch:
        train(model, optimizer, x)
        loss = model(x).sum()
        page = watch.page()
    kinds = page.by_kind()
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert kinds["optimizer"] == 2 * parameters + 4 * 4  # two moments, and a step for each tensor
    assert kinds["inputs"] == 4 * 8 * 4
    # Each block keeps its tanh's result, and the first one's output is kept by the second.
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
    assert lines[1].endswith("allocations were looked at in 1 of 1 steps")
    assert "parameters, gradients, optimizer inside: to shard or offload" in lines
    assert "kept for backward inside: to checkpoint or offload" not in lines
    assert len(lines) < 60


def test_growth_since_the_step_before_is_on_the_page(model_and_optimizer, train):
    """By module and line."""
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
    first = lines[lines.index("grew in the last step that was looked at") + 1]
    assert first.split() == ["4", "kB", "(outside),", *first.split()[-1:]]
    assert first.split()[-1].startswith("test_memory_page.py:")
