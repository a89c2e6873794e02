"""DDP, FSDP2 and DCP with checkpointed modules: gradients and names match the plain model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.dist
def test_every_layer_under_every_wrapper_of_torch(tmp_path):
    """Four layers in three arrangements, on two ranks."""
    world = 2
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path / "store"), str(rank), str(world)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.count("ok ") == 12, output
