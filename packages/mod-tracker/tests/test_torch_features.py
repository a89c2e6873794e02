"""Scripted, exported, fake and fused modules under a tracker."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from mod_tracker import ModTracker, profile_memory

from ._small import shows_saved


def test_scripted_module_and_data_parallel_are_seen_as_one(x):
    """A scripted module is one opaque module; DataParallel on CPU works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    model = nn.Sequential(scripted, nn.DataParallel(nn.Linear(4, 4)))
    tracker, names = ModTracker(), []
    tracker.register_user_hooks(lambda *_: names.append(tracker.current))
    with tracker:
        model(x).sum().backward()
    assert names == ["Sequential", "Sequential.0", "Sequential.1", "Sequential.1.module"]


def test_encoder_fast_path_stays():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    tracker, names = ModTracker(), []
    tracker.register_user_hooks(lambda *_: names.append(tracker.current))
    with tracker, torch.no_grad():
        layer(torch.randn(1, 3, 8))
    assert names == ["TransformerEncoderLayer"]


def test_export_traces_and_is_not_tracked(mlp):
    """torch.export gives the same program inside a tracker, which records no module of it."""
    tracker, names = ModTracker(), []
    tracker.register_user_hooks(lambda *_: names.append(tracker.current))
    with tracker:
        program = torch.export.export(mlp, (torch.randn(2, 4),))
    x = torch.randn(2, 4)
    assert torch.equal(program.module()(x), mlp(x))
    assert not [name for name in names if "export" in name.lower()]


@shows_saved
def test_memory_over_several_iterations(mlp, x):
    with profile_memory() as one:
        mlp(x).sum().backward()
    with profile_memory() as two:
        mlp(x).sum().backward()
        mlp(x).sum().backward()
    assert two.sum("self_saved") == 2 * one.sum("self_saved") > 0
