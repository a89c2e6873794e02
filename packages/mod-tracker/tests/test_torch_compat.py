"""The one room with private torch names: what it finds, and what it does without."""

from __future__ import annotations

from torch import nn

import mod_tracker._torch_compat as compat


def test_everything_is_there_on_this_torch():
    """On every supported torch, backward attribution works and the shortcut is known."""
    assert compat.EXACT_BACKWARD
    assert compat.CARRIES
    assert compat.SHORTCUT is nn.Module.__call__
