"""Pickled shards are loaded by a process that has only imported the package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flat_param import StateError
from flat_param.sharded._stored_shard import Extent, StoredShard

LOAD = """
import sys, torch, flat_param
shard = torch.load(sys.argv[1], weights_only=True)
print(shard, tuple(shard.shape), "torch.distributed.checkpoint" in sys.modules)
"""


def shard():
    """Three of the six elements of a matrix."""
    return StoredShard(torch.arange(3.0), Extent("w", (2, 3), (0, 1), 3, 6, (2, 3), (0, 0)))


def test_weights_only_load_needs_the_package_alone(tmp_path):
    """It makes the shard, and does not import torch's checkpoint package."""
    torch.save(shard(), tmp_path / "state.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "state.pt")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.startswith("StoredShard('w', elements 3 to 6 of shape (2, 3)) (2, 3) False")


def test_operators_are_refused_by_name():
    """They would compute with one rank's elements."""
    with pytest.raises(StateError, match="was called on 'w' of a state dict"):
        shard().sum()
