"""A checkpoint of a sharded model is loaded into a plain one, by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flat_param import CheckpointError, fully_shard, load_sharded, save_sharded
from flat_param.checkpoint import _files


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 15).reshape(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_plain_model_trains_on_as_the_sharded_one(group_of_one: None, tmp_path: Path) -> None:
    """Parameters, buffers and the optimizer's state: the next step has the same bits."""
    sharded, _ = model_and_optimizer()
    fully_shard(sharded)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    step(sharded, optimizer)
    save_sharded(sharded, tmp_path, optimizer=optimizer)
    plain, own = model_and_optimizer()
    load_sharded(plain, tmp_path, optimizer=own)
    for _ in range(2):
        step(sharded, optimizer)
        step(plain, own)
    whole = {name: param.full_tensor() for name, param in sharded.named_parameters()}
    for name, param in plain.named_parameters():
        assert torch.equal(param, whole[name]), name
    assert torch.equal(plain[1].running_mean, sharded[1].running_mean)


def test_save_that_replaces_files_while_they_are_loaded_is_named(
    group_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata of the old save name files that the new save deletes."""
    model, read_into = nn.Linear(3, 4), _files.read_into
    fully_shard(model)
    save_sharded(model, tmp_path)

    def read_after_another_save(*args: object) -> None:
        monkeypatch.undo()
        save_sharded(model, tmp_path)
        read_into(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(_files, "read_into", read_after_another_save)
    plain = nn.Linear(3, 4)
    with pytest.raises(CheckpointError, match="replaced the checkpoint while it was loaded"):
        load_sharded(plain, tmp_path)
    load_sharded(plain, tmp_path)
