"""The picture and tables of fronts are those of the committed runs, and hold what is promised."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_the_same_bytes_take_less_time_than_in_torchs_ways() -> None:
    """Divided over blocks by `fit_`, at each budget, of all ways of torch's that keep no more."""
    drawing = _drawing()
    for kind in json.loads((FOLDER / "frontier.json").read_text(encoding="utf-8"))["blocks"]:
        divided = drawing.ahead(kind, "sac-policies, fit_ of kept bytes")
        behind = [asked for asked, ours, theirs in divided if ours >= theirs]
        assert len(divided) >= 7
        assert behind == [], kind["block"]


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


def _timed(model: str, **times: list[float] | None) -> dict[str, Any]:
    return {"model": model, "plain ms": [4.0, 5.0], "times": {"none": [1.0, 1.0], **times}}


TIMED = {
    "models": [
        _timed(
            "one", full=[1.5, 1.5], selective=[1.6, 1.8], products=[1.3, 1.3], budget=[1.4, 1.8]
        ),
        _timed("two", full=[1.2, 1.2], selective=[1.1, 1.1], products=[1.25, 1.3], budget=None),
    ]
}


def test_times_are_a_table_once_they_are_taken() -> None:
    """Ranges over runs; what could not be had is a dash, and without any there is no table."""
    drawing = _drawing()
    assert drawing.times_table(TIMED) == [
        "| model | plain, ms | full | torch, products kept | products kept | budget |",
        "|---|---|---|---|---|---|",
        "| one | 4.00 to 5.00 | 1.50 | 1.60 to 1.80 | 1.30 | 1.40 to 1.80 |",
        "| two | 4.00 to 5.00 | 1.20 | 1.10 | 1.25 to 1.30 | - |",
    ]
    assert drawing.times_table({"models": [{"model": "one"}]}) == []


def test_models_on_which_ours_takes_more_are_named() -> None:
    """Products kept beside torch's selective checkpointing, others beside the full one."""
    drawing = _drawing()
    assert drawing.compared_table(TIMED)[2:] == [
        "| products kept | torch, products kept | 0.96 | 1 of 2 | two 1.159 |",
        "| budget | full | 1.07 | 0 of 1 | one 1.067 |",
    ]
    assert drawing.compared_table({"models": [{"model": "one"}]}) == []


def test_budgets_are_compared_where_full_checkpointing_fits_them() -> None:
    """Where it takes more than the budget, its time is for something else."""
    rows = [
        _timed(model, full=[1.5, 1.5], **{"fit_ 60%": [1.8, 1.8]}) | {"full peak": peak}
        for model, peak in (("within", 0.6), ("over", 0.601))
    ]
    found = _drawing().over_theirs({"models": rows}, "fit_ 60%", "full")
    assert found == {"within": pytest.approx(1.2)}
