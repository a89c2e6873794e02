"""Edge: writes a report and its renderings into a folder, each file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchparts_conformance import _report


def write_all(report: Mapping[str, Any], folder: Path) -> None:
    """Write every rendering of a report; the report itself comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "report.json", _report.to_text(report))


def write(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that a reader never sees half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(beside, path)
