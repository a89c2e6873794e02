"""Optimizer state by name."""

from __future__ import annotations

import pytest
import torch

from flat_param import ParameterError
from flat_param.checkpoint._optim_state import optimizer_params


def test_what_has_no_groups_is_no_optimizer() -> None:
    """Such as its name."""
    with pytest.raises(
        ParameterError, match="optimizer is of type str, but it must be an optimizer"
    ):
        optimizer_params(torch.nn.Linear(2, 2), "adam")  # type: ignore[arg-type]
