"""Writes a report and its renderings into a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchparts_conformance.render import _badge, _html, _junit, _matrix
from torchparts_conformance.report import _report
from torchparts_conformance.requirements._cases import cases_by_id, load_registry


def write_all(report: Mapping[str, Any], folder: Path) -> None:
    """Write every rendering of a report; the report itself comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    for badge in _badge.badges(report):
        write(folder / f"badge-{badge.area}.json", _badge.to_shields(badge))
        write(folder / f"badge-{badge.area}.svg", _badge.to_svg(badge))
    write(folder / "junit.xml", _junit.to_junit(report))
    write_matrix([report], folder / "matrix.html", folder / "matrix.md")
    write(folder / "report.json", _report.to_text(report))


def write_matrix(
    reports: Sequence[Mapping[str, Any]], page: Path | None, markdown: Path | None
) -> None:
    """Write the matrix of several reports as a page, as Markdown, or both."""
    for path, text in zip((page, markdown), matrix_texts(reports), strict=True):
        if path is not None:
            write(path, text)


def matrix_texts(reports: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Give the matrix of several reports as a page and as Markdown."""
    matrix = _matrix.matrix(reports, load_registry())
    return _html.to_html(matrix, cases_by_id()), _matrix.to_markdown(matrix)


def write(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that a reader never sees half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(beside, path)
