"""DDP, FSDP2 and DCP with checkpointed modules: gradients and names match the plain model."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from torchparts_conformance.ranks import Ranks

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.dist
def test_every_layer_under_every_wrapper_of_torch():
    """Four layers in three arrangements, on two ranks."""
    with contextlib.closing(Ranks("ckpt_wrap", "pytest")) as ranks:
        assert ranks(2, f"{WORKER}::every_arrangement", timeout_s=120) == [12, 12]
