"""Two implementations that are known: torch's own is core, and what is not is written down."""

from __future__ import annotations

import subprocess

import pytest

from torchparts_conformance import _commands, _report
from torchparts_conformance._registry import load_registry

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def torch_rows(tmp_path_factory):
    """Run torch's own implementation once, over all areas."""
    folder = tmp_path_factory.mktemp("torch")
    command = [*_commands.pytest_command(), "--impl=torch", f"--out={folder}"]
    subprocess.run(command, check=False, capture_output=True, timeout=400)
    return _report.read(folder / "report.json")["rows"]


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
