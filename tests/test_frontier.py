"""The picture and tables of fronts are those of the committed runs, and hold what is promised."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/benchmarks"
MODELS = json.loads((FOLDER / "frontier-models.json").read_text(encoding="utf-8"))["models"]
NINE = {"Llama", "Qwen 3", "Mixtral", "Mamba", "ViT", "ResNet", "BERT", "T5", "UNet2D", "GPT-2"}


def _drawing() -> ModuleType:
    path = ROOT / "packages/sac-policies/benchmarks/draw_frontier.py"
    spec = importlib.util.spec_from_file_location("draw_frontier", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_drawn_from_the_committed_runs() -> None:
    """The same numbers always give the same files."""
    for path, wanted in _drawing().main(FOLDER).items():
        assert path.read_text(encoding="utf-8") == wanted


def test_table_without_a_mark_is_noticed() -> None:
    """A page that lost one would keep old figures."""
    with pytest.raises(SystemExit, match="has 0 marks for the table 'blocks'"):
        _drawing().page_of("text\n", {"blocks": ["| a |"]})


def test_models_free_what_full_checkpointing_frees() -> None:
    """At least 98 % on each model that was named for it, with every gradient bit the same."""
    named = {row["model"]: row for row in MODELS if row["model"] in NINE}
    assert named.keys() == NINE
    assert [name for name, row in named.items() if row["freed"] < 0.98] == []
    assert [row["model"] for row in MODELS if not all(row["bitwise"].values())] == []


def test_no_model_keeps_more_than_under_torchs_selective_checkpointing() -> None:
    """With the same operators saved; where that raises there is nothing to hold it against."""
    sizes = {row["model"]: row["bytes"] for row in MODELS}
    compared = {name: each for name, each in sizes.items() if each["selective"] is not None}
    assert len(compared) == 30
    over = [name for name, each in compared.items() if each["products"] > each["selective"]]
    assert over == []


def test_peaks_are_predicted() -> None:
    """Within 3 % of what was measured."""
    for row in MODELS:
        for asked, found in row["budgets"].items():
            assert not found["fits"] or abs(found["off"]) <= 3, (row["model"], asked)


def test_budgets_fit_where_full_checkpointing_does() -> None:
    """And what was found stays within the budget."""
    for row in MODELS:
        for asked, found in row["budgets"].items():
            allowed = int(asked[:-1]) / 100
            assert found["fits"] or row["full peak"] > allowed, (row["model"], asked)
            assert not found["fits"] or found["share"] <= allowed
