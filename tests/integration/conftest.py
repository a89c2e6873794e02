"""Setup for all tests of this folder: no network, one thread, one seed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true")
sys.path.insert(0, str(Path(__file__).parent))  # helper modules of this folder
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of other libraries; elsewhere in this repository warnings are errors."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed every test, and restore the default dtype after it."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
