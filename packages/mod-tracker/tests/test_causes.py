"""The five causes of memory at the peak, with bytes calculated by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from mod_tracker import profile_memory, watch_memory
from mod_tracker.reports._allocations import CAUSES


class Language(nn.Module):
    """An embedding, a layer, a norm and a head; forward computes the loss."""

    def __init__(self, vocabulary, width, hidden):
        super().__init__()
        self.embed, self.up = nn.Embedding(vocabulary, width), nn.Linear(width, hidden, bias=False)
        self.down, self.norm = nn.Linear(hidden, width, bias=False), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu())
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def causes_of(vocabulary=32, width=16, hidden=16, tokens=8, fake=True):
    """Return the causes of two training steps; without data if `fake`."""
    with FakeTensorMode() if fake else torch.enable_grad():
        model = Language(vocabulary, width, hidden)
        optimizer = torch.optim.AdamW(model.parameters())
        with profile_memory(model, optimizer=optimizer) as report:
            for _ in range(2):
                model(torch.zeros(1, tokens, dtype=torch.int64)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return report, model


SIZES = {
    "parameters": {"vocabulary": 4096, "width": 64, "hidden": 4096, "tokens": 2},
    "activations": {"vocabulary": 16, "width": 64, "hidden": 1024, "tokens": 4096},
    "logits and loss": {"vocabulary": 8192, "width": 16, "hidden": 16, "tokens": 1024},
}


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("largest", ["activations", "logits and loss"])
def test_largest_cause_is_named(largest, fake):
    report, _ = causes_of(**SIZES[largest], fake=fake)
    assert next(iter(report.causes)) == largest
    assert f"{largest} {report.show(report.causes[largest])}" in str(report)


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_static_causes_are_those_by_hand(fake):
    report, model = causes_of(**SIZES["parameters"], fake=fake)
    parameters = sum(4 * each.numel() for each in model.parameters())
    assert report.causes["parameters"] == parameters
    assert report.causes["gradients"] == parameters
    assert report.causes["optimizer"] >= 2 * parameters
    assert set(report.causes) == set(CAUSES)
    assert next(iter(report.causes)) == "optimizer"


def test_causes_add_up_to_live_bytes_at_the_peak():
    model = Language(32, 16, 16)
    with profile_memory(model) as report:
        model(torch.zeros(1, 8, dtype=torch.int64)).backward()
    before = sum(4 * each.numel() for each in model.parameters())
    assert sum(report.causes.values()) == report.peak + before


def test_logits_and_activations_equal_a_count_by_hand():
    """The logits, their logarithms, and a gradient of either: tokens times vocabulary each."""
    report, _ = causes_of(**SIZES["logits and loss"])
    logits = 1024 * 8192 * 4
    assert 2 * logits <= report.causes["logits and loss"] <= 4 * logits


def test_forward_alone_has_logits_too():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1000))
    with torch.no_grad(), profile_memory(model) as report:
        kept = model(torch.ones(2, 4))
    assert report.causes["logits and loss"] == 2 * 1000 * 4
    assert kept.shape == (2, 1000)


def test_page_has_the_same_causes():
    """The optimizer is found without being passed."""
    model = Language(64, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    with watch_memory(model) as watch:
        model(torch.zeros(1, 8, dtype=torch.int64)).backward()
        optimizer.step()
        loss = model(torch.zeros(1, 8, dtype=torch.int64))
        causes = watch.page().by_cause()
    parameters = sum(4 * each.numel() for each in model.parameters())
    assert set(causes) == set(CAUSES)
    assert causes["parameters"] == causes["gradients"] == parameters
    assert causes["optimizer"] >= 2 * parameters
    assert causes["logits and loss"] >= 8 * 64 * 4
    assert loss.requires_grad
