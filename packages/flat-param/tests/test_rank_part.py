"""What one rank saves: under the plain module's names, as it is or as it was."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import nn

import flat_param
from flat_param.checkpoint._rank_part import RankPart
from flat_param.dcp._dcp_write import Serialized

pytestmark = pytest.mark.usefixtures("group_of_one")


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = flat_param.fully_shard(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _part(model: nn.Module, optimizer: torch.optim.Optimizer) -> RankPart:
    part = RankPart()
    part.fill(model, optimizer, Path("folder/name"), 7)
    return part


def _tensors(part: RankPart) -> dict[str, torch.Tensor]:
    return {each.key: each.elements.clone() for each in part.tensor_slices}


def test_keys_are_those_of_the_plain_module_and_optimizer() -> None:
    """Parameters, buffers, moments and options; and what the leader compares."""
    part = _part(*_trained())
    params = ("0.weight", "0.bias", "1.weight", "1.bias")
    buffers = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    state = {f"optim.state.{n}.{key}" for n in params for key in ("exp_avg", "exp_avg_sq", "step")}
    assert set(_tensors(part)) == {f"model.{name}" for name in (*params, *buffers)} | state
    assert part.values["optim.param_groups.0.lr"] == 0.5
    assert part.values["optim.param_groups.0.params"] == list(params)
    assert (part.note["path"], part.note["step"]) == ("name", 7)
    assert part.error is None


def test_snapshot_stays_as_it_was() -> None:
    """Where a part without one changes with its module and options."""
    model, optimizer = _trained()
    part, snapshot = (_part(model, optimizer) for _ in range(2))
    snapshot.take_snapshot()
    before = _tensors(part)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    assert not any(torch.equal(_tensors(part)[k], v) for k, v in before.items() if "model" in k)
    assert all(torch.equal(_tensors(snapshot)[key], value) for key, value in before.items())
    frozen = snapshot.values["optim.param_groups.0.betas"]
    assert isinstance(frozen, Serialized)
    assert torch.load(io.BytesIO(frozen.data), weights_only=True) == (0.9, 0.999)


def test_snapshot_has_no_memory_of_the_module() -> None:
    """Copies lie in one piece of memory, which is as large as all slices, but for alignment."""
    part = _part(*_trained())
    homes = {each.elements.untyped_storage().data_ptr() for each in part.tensor_slices}
    part.take_snapshot()
    copies = [each.elements.untyped_storage() for each in part.tensor_slices]
    assert not homes & {copy.data_ptr() for copy in copies}
    assert len({copy.data_ptr() for copy in copies}) == 1
    assert copies[0].nbytes() < sum(each.elements.nbytes + 64 for each in part.tensor_slices)
