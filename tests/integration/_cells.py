"""Run every model through every part, and write what came of it.

    PYTHONPATH=downstream python downstream/models/run.py OUT.json [--only MODEL ...]

Each cell is a process forked from this one, with a time limit: one that crashes or hangs is told
as such, and the others are not touched by it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import signal
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _parts
import torch
from _cases import CASES
from _models import Case
from _pytest.outcomes import Skipped
from _table import version_of
from _two_ranks import ranks

LIMIT_S = 120
JUDGES = {
    "step": _parts.step,
    "names": _parts.names,
    "reports": _parts.reports,
    "trained": _parts.trained,
    "ranks": ranks,
}


def outcome_of(part: _parts.Part, case: Case) -> dict[str, Any]:
    """What came of one cell."""
    larger = case if part.judge == "ranks" else _parts.enlarged(case)
    try:
        return {"outcome": "equal", **JUDGES[part.judge](part, larger, *_parts.twins(case))}
    except _parts.DiffersError as error:
        return error.told()
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return {"outcome": "raises", "error": f"{type(error).__name__}: {first}"}


def cell(part: _parts.Part, case: Case, answer: Connection) -> None:
    """The process of one cell."""
    os.setsid()
    warnings.simplefilter("ignore")
    answer.send(outcome_of(part, case))


def in_process(part: _parts.Part, case: Case, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """A cell, whatever becomes of its process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=cell, args=(part, case, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(limit_s) else {"outcome": "takes too long"}
    except EOFError:
        process.join()
        found = {"outcome": "crashes", "error": f"the process ended with {process.exitcode}"}
    if found["outcome"] == "takes too long":
        found["error"] = f"more than {limit_s:g} s"
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return {"model": case.name, "part": part.name, **found}


def about(case: Case) -> dict[str, Any]:
    """What the page says of a model itself; it is made here once, so that each cell finds it."""
    model = case.build()
    return {
        "name": case.name,
        "library": case.library,
        "class": type(model).__name__,
        "parameters": sum(param.numel() for param in model.parameters()),
        "blocks": len(case.blocks_of(model)),
        "block_classes": sorted({type(b).__name__ for b in case.blocks_of(model).values()}),
        "named_by_hand": bool(case.blocks),
    }


def versions() -> dict[str, str]:
    """What the results depend on."""
    libraries = sorted({case.library for case in CASES})
    return {"python": platform.python_version()} | {n: version_of(n) for n in ("torch", *libraries)}


def kept_from(out: Path, names: list[str]) -> tuple[list[Any], list[Any]]:
    """Models and cells of an earlier run with the same versions, but for these models."""
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if before.get("versions") != versions():
        return [], []
    return (
        [model for model in before["models"] if model["name"] not in names],
        [cell for cell in before["cells"] if cell["model"] not in names],
    )


def main() -> None:
    """Write the results; with `--only`, other models keep theirs, of the same versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models, cells = kept_from(options.out, options.only)
    for case in (case for case in CASES if case.name in options.only):
        began = time.monotonic()
        try:
            models.append(about(case))
        except Skipped as skip:
            print(f"{case.name}: {skip.msg}", flush=True)
            continue
        mine = [in_process(part, case) for part in _parts.PARTS]
        cells += mine
        wrong = [found for found in mine if found["outcome"] != "equal"]
        took = time.monotonic() - began
        print(f"{case.name}: {len(mine) - len(wrong)} of {len(mine)} equal, {took:.0f} s")
        for found in wrong:
            print("   ", json.dumps(found), flush=True)
    order = [case.name for case in CASES]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}, CPU, one thread",
        "versions": versions(),
        "copies": _parts.COPIES,
        "parts": [dataclasses.asdict(part) for part in _parts.PARTS],
        "own": _parts.OWN,
        "models": sorted(models, key=lambda model: order.index(model["name"])),
        "cells": sorted(cells, key=lambda cell: order.index(cell["model"])),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
