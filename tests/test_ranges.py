"""Ranges of several runs come into pages, and one run is none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RECORD = "<!-- figures: docs/benchmarks/ranges.json -->"


@pytest.fixture(scope="module")
def ranges() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("ranges", ROOT / ".ci/ranges.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(by: float, machine: str = "a, 2 cores") -> dict[str, Any]:
    """What a run would say, all of it so many times as much."""
    kinds = {"torch's wrapper": 20.0 * by, "nested": 1.004 * by, "in place": 0.25 * by}
    way = {"time": 1.5 * by, "kept_mib": 14.03}
    return {
        "day": "2026-11-30",
        "machine": machine,
        "torch": "2.13.0",
        "python": "3.11",
        "wrapper": dict.fromkeys(("call", "forward", "attribute", "state_dict"), kinds),
        "ways": {width: {"none": way, "ours, recipe": way} for width in ("32", "128", "256")},
    }


def test_every_table_has_its_place(ranges: ModuleType) -> None:
    """Each name is on a page, and each mark on a page is the name of a table."""
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in ranges.PAGES]
    runs = [run(1.0), run(1.2)]
    for name, lines in ranges.tables(runs).items():
        (text,) = [text for text in texts if f"<!-- ranges: {name} -->" in text]
        assert "\n".join(lines) in ranges.written(text, runs)
    assert sum(text.count("<!-- ranges: ") for text in texts) == len(ranges.tables(runs))


def test_page_says_least_and_most_and_how_many_machines(ranges: ModuleType) -> None:
    """Only the sentence and the table change, and writing twice is as once."""
    runs = [run(1.0), run(1.2, "b, 8 cores")]
    page = (
        "Before.\n\n<!-- ranges: ways -->\n\nOne run:\n\n<!-- figures: x.md -->\n\n"
        "| a | b |\n|---|---|\n| c | 1.0 |\n\nAfter.\n"
    )
    found = ranges.written(page, runs)
    assert found == ranges.written(found, runs)
    assert found.startswith("Before.\n\n<!-- ranges: ways -->\n\nLowest and highest values of 2 ")
    assert "on 2 machines (a, 2 cores; b, 8 cores), torch 2.13.0, 2026-11-30:" in found
    assert "| recipe engine | 1.50 to 1.80 | 1.50 to 1.80 | 1.50 to 1.80 | 14.0 |\n\nAft" in found
    assert RECORD in found and "x.md" not in found


def test_figures_of_pages_are_in_the_file(
    ranges: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lint asks; a table that is changed by hand is found."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    figures = importlib.import_module("figures")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    runs = [run(1.0), run(1.37)]
    ranges.save(runs, tmp_path / "docs/benchmarks/ranges.json")
    table = "\n".join([RECORD, "", *ranges.tables(runs)["wrapper"], ""])
    assert list(figures.unfounded("a.md", table)) == []
    (fault,) = figures.unfounded("a.md", table.replace("0.25 to 0.34", "0.24 to 0.34", 1))
    assert "says '0.24 to 0.34'" in fault


def test_one_run_is_no_range(
    ranges: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is kept, and the next one is added to it."""
    file = tmp_path / "ranges.json"
    assert ranges.main(["--runs", "1", "--file", str(file)], once=lambda: run(1.0)) == 1
    assert "1 run is no range" in capsys.readouterr().out
    assert ranges.main(["--runs", "1", "--file", str(file)], once=lambda: run(1.1)) == 0
    assert len(json.loads(file.read_text(encoding="utf-8"))["runs"]) == 2


def test_write_notes_tables_again_and_runs_nothing(ranges: ModuleType, tmp_path: Path) -> None:
    """Tables that were noted by an older script are replaced, the runs stay as they are."""
    file = tmp_path / "ranges.json"
    runs = [run(1.0), run(1.2)]
    file.write_text(json.dumps({"runs": runs, "tables": {"of old": []}}), encoding="utf-8")
    assert ranges.main(["--write", "--file", str(file)], once=pytest.fail) == 0
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "runs": runs,
        "tables": ranges.tables(runs),
    }


def test_write_puts_noted_tables_into_pages(
    ranges: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages say what the file says, and their figures are recorded after both are written."""
    page, file = tmp_path / "page.md", tmp_path / "ranges.json"
    page.write_text(
        f"<!-- ranges: wrapper -->\n\n{RECORD}\n\n| a |\n|---|\n| 1.0 |\n", encoding="utf-8"
    )
    file.write_text(json.dumps({"runs": [run(1.0), run(1.37)], "tables": {}}), encoding="utf-8")
    seen = []

    def record(command: list[str], *, check: bool) -> None:
        lines = json.loads(file.read_text(encoding="utf-8"))["tables"]["wrapper"]
        seen.append((command[1:], "\n".join(lines) in page.read_text(encoding="utf-8"), check))

    for name, value in (("ROOT", tmp_path), ("FILE", file), ("PAGES", (page.name,))):
        monkeypatch.setattr(ranges, name, value)
    monkeypatch.setattr(ranges.subprocess, "run", record)
    assert ranges.main(["--write", "--file", str(file)], once=pytest.fail) == 0
    assert seen == [([str(tmp_path / ".ci/figures.py"), "--record"], True, True)]
    assert "| 0.25 to 0.34 |" in page.read_text(encoding="utf-8")
