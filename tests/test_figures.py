"""A figure that was typed by hand into a README or page fails `lint`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def figures() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / ".ci/figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _all(figures: ModuleType) -> list[Path]:
    assert len(figures.sources()) > 40
    return figures.sources()


def test_every_figure_has_a_source(figures: ModuleType) -> None:
    """In all READMEs and pages, and no benchmark page was changed by hand."""
    found = [
        line
        for path in _all(figures)
        for line in figures.unfounded(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found == list(figures.changed()) == []


TYPED = ("It is 47x faster.", "It keeps 12.34 MiB.", "| a | b |\n|---|---|\n| c | 1.30 |")


@pytest.mark.parametrize("typed", TYPED, ids=["ratio", "bytes", "cell"])
def test_figure_typed_into_any_readme_or_page_is_named(figures: ModuleType, typed: str) -> None:
    """At its end, in each of them, one that nobody measured; in code it is none."""
    for path in _all(figures):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        (found,) = figures.unfounded(name, f"{text}\n\n{typed}\n")
        assert found.startswith(f"{name}:") and "put <!-- figures: FILE -->" in found
        assert list(figures.unfounded(name, f"{text}\n\n```text\n{typed}\n```\n")) == []


def test_figure_that_its_source_does_not_say_is_named(figures: ModuleType) -> None:
    """Each number of every marked table and paragraph is changed in turn."""
    tried = 0
    for path in _all(figures):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        for mark in re.finditer(r"^<!-- figures: \S+ -->\n\n((?:.+\n)+)", text, re.MULTILINE):
            block = mark[1]
            for number in re.finditer(r"(?<=[ |])\d+\.\d+(?=[ ,|])", block):
                at = mark.start(1) + number.start()
                wrong = text[:at] + "98765.4" + text[at + len(number[0]) :]
                assert list(figures.unfounded(name, wrong)), (name, number[0])
                tried += 1
    assert tried > 30


def test_benchmark_page_changed_by_hand_is_named(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One digit is enough, and words are free."""
    folder = tmp_path / "docs/benchmarks"
    folder.mkdir(parents=True)
    for path in figures.results():
        (folder.parents[1] / path.relative_to(ROOT)).write_text(
            path.read_text() + "\nSome words.\n"
        )
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert list(figures.changed()) == []
    for path in [*folder.iterdir(), folder.parent / "downstream.md"]:
        text = path.read_text()
        path.write_text(text + "\n| 1.5 |\n")
        (found,) = figures.changed()
        assert path.name in found and "--record" in found
        path.write_text(text)


def test_source_that_is_not_there_is_named(figures: ModuleType) -> None:
    """A mark does not help by itself."""
    page = "<!-- figures: nowhere.json -->\n\nIt is 2x.\n"
    assert list(figures.unfounded("p.md", page)) == [
        "p.md:3 names nowhere.json, which is not there"
    ]
