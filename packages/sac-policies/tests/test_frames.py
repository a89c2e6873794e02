"""The user's current line is found for messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sac_policies
from sac_policies._frames import _is_inside


@pytest.mark.parametrize("package", [torch, sac_policies])
def test_neighbour_with_a_longer_name_is_not_inside(package: object) -> None:
    """A library beside torch whose name begins with "torch" counts as user code."""
    folder = Path(package.__file__).parent
    assert _is_inside(str(folder / "nn" / "modules.py"))
    assert not _is_inside(str(folder.with_name(folder.name + "vision") / "ops.py"))
