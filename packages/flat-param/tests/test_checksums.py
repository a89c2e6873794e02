"""Checksums of checkpoints whose tensors are larger than the block that is read at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flat_param import CheckpointError, fully_shard, load_sharded, save_sharded
from flat_param.checkpoint import _files


def test_large_tensor_is_loaded_and_its_damage_found(group_of_one: None, tmp_path: Path) -> None:
    """Of more than one block; a flipped bit in the last one is an error."""
    model = fully_shard(nn.Linear(1024, 5000, bias=False))
    assert model.weight.nbytes > _files._BLOCK_BYTES
    before = model.weight.detach().clone()
    save_sharded(model, tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    load_sharded(model, tmp_path)
    assert torch.equal(model.weight, before)
    (file,) = tmp_path.glob("save-*/*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) - 100_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: 20481"):
        load_sharded(model, tmp_path)
    assert torch.equal(model.weight, before)
