"""Two implementations that are known: torch's own is core, and what is not is written down."""

from __future__ import annotations

import pytest

from torchparts_conformance.requirements._registry import load_registry

pytestmark = pytest.mark.slow


@pytest.fixture
def torch_rows(control_rows):
    """Give the rows of torch's own implementation, over all areas."""
    return control_rows["torch"]


def test_torch_passes_core_but_for_what_is_written_down(torch_rows):
    """A core requirement that torch breaks says so in its entry, with the reason."""
    registry = load_registry()
    broken = {row["id"] for row in torch_rows if _is_core(row) and row["outcome"] != "pass"}
    noted = {id for id, r in registry.items() if r.profile == "core" and r.torch_deviation}
    assert broken <= noted


def test_robust_requirements_find_something_in_torch(torch_rows):
    """The profile is about what the source gets wrong; most of it fails there."""
    robust = [row for row in torch_rows if row["profile"] == "robust"]
    assert sum(row["outcome"] != "pass" for row in robust) > len(robust) / 2


def _is_core(row):
    return row["profile"] == "core" and row["device"] == "cpu"
