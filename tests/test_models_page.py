"""The page of models is what its results give, and nothing typed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "downstream/models"
RESULT = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("models_page", FOLDER / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_written_from_the_committed_results(writer: ModuleType) -> None:
    """A figure or a verdict that was typed by hand is found."""
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == writer.page(RESULT)


def test_results_hold_every_part_of_twenty_models() -> None:
    """No cell is left out, whatever became of it."""
    models = [model["name"] for model in RESULT["models"]]
    parts = [part["name"] for part in RESULT["parts"]]
    assert len(models) >= 20
    found = [(cell["model"], cell["part"]) for cell in RESULT["cells"]]
    assert found == [(model, part) for model in models for part in parts]


def test_page_tells_what_is_not_equal(writer: ModuleType) -> None:
    """A cell that differs has a note, is counted, and does not claim to know why."""
    result = json.loads(json.dumps(RESULT))
    cell = next(c for c in result["cells"] if (c["model"], c["part"]) == ("Llama", "in place"))
    cell.update(outcome="differs", where="gradient of x", by=0.25)
    text = writer.page(result)
    assert "Llama, in place: differs in `gradient of x`, by 2.5e-01" in text
    assert "The cause is not known yet." in text
    assert writer.unexplained(RESULT) == []
    assert [line.partition(":")[0] for line in writer.unexplained(result)] == ["Llama, in place"]
