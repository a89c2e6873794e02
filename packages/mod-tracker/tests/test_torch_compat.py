"""The one room with private torch names: what it finds, and what it does without."""

from __future__ import annotations

import mod_tracker._torch_compat as compat


def test_everything_is_there_on_this_torch():
    """On every supported torch, backward attribution works."""
    assert compat.EXACT_BACKWARD
    assert compat.CARRIES
