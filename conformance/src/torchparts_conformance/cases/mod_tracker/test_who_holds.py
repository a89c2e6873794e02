"""Memory measurement does not hide errors."""

from __future__ import annotations

import pytest

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import leaf


def _changes_what_was_saved(measure, device):
    x = leaf(device)
    with pytest.raises(RuntimeError), measure():
        y = x.exp()
        y.add_(1)
        y.sum().backward()


@requirement(
    "MT-254",
    "Measuring memory MUST NOT hide that a tensor was changed in place after it was saved for "
    "backward.",
    rationale="saved-tensor hooks disable torch's own check",
    profile="reports",
)
def test_measured_change_after_saving_is_an_error(part, device):
    """The error is the same as without measuring."""
    _changes_what_was_saved(part.profile_memory, device)
