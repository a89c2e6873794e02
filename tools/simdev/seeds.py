"""Runs of `product.py` that have failed once, in `seeds.json`: they are run first from then on."""

from __future__ import annotations

import json
from pathlib import Path

PATH = Path(__file__).parent / "seeds.json"
Run = tuple[str, int]  # a cell and a seed


def kept() -> dict[Run, str]:
    """What each of them found, by cell and seed."""
    return {(row["cell"], row["seed"]): row["found"] for row in json.loads(PATH.read_text("utf-8"))}


def keep(cell: str, seed: int, found: str) -> None:
    """Add one; what it has found first stays."""
    rows = kept()
    rows.setdefault((cell, seed), found)
    lines = [
        json.dumps({"cell": cell, "seed": seed, "found": found})
        for (cell, seed), found in sorted(rows.items())
    ]
    PATH.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
