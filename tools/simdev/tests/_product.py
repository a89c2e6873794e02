"""Every way of saving memory in every situation of a device, on random schedules.

`python -m simdev product.py --seconds 60 --seed 0 --page README.md`, from this folder. A run has a
seed, which says how long everything takes; each seed is tried in every cell until the time is over,
and at least one is. What fails is printed with its seed, `--only WAY/SITUATION --seed N --runs 1`
repeats it, and `seeds.json` keeps it: what has failed before is run first. A run is right if no
race was reported and the gradients are plain's, bit for bit; of a fault the program has to be told,
and the step after it has to be plain's, with nothing left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mod_tracker

sys.path.insert(0, str(Path(__file__).parent))
import seeds
from ways import BLOCKS, PLAIN, SHARDED, SIM, SITUATIONS, WAYS, ZERO, Block, given, no_sense

ALL = WAYS | SHARDED
STEPS = 2
CELL_S = 60  # for a cell, on a machine that others use too
BEGIN, END = "<!-- product: begin -->", "<!-- product: end -->"
Found = tuple[list[str], str]  # races, and what else was wrong


def schedule(chosen: random.Random, *, virtual: bool | None = None) -> dict[str, Any]:
    """How long things take, microseconds; real time is kept short."""
    virtual = chosen.random() < 0.6 if virtual is None else virtual
    return {
        "virtual": virtual,
        "kernel_us": chosen.choice((0, 20, 100) if virtual else (0, 20)),
        "copy_us": chosen.choice((0, 50, 1000, 5000) if virtual else (0, 50, 300)),
        "host_us": chosen.choice((0, 0, 5, 50)) if virtual else 0,
        "queue_limit": chosen.choice((0, 0, 4, 32)),
        "jitter": chosen.random() < 0.5,
    }


def part(seed: int, where: torch.device, way: str | None) -> nn.Sequential:
    """A few blocks on a device, plain or changed."""
    torch.manual_seed(seed)
    built = [Block() for _ in range(BLOCKS)]
    stays = way is not None and "cpu_offload" in way
    blocks = [block if stays else block.to(where) for block in built]
    return nn.Sequential(*(ALL[way](block) if way else block for block in blocks))


@contextlib.contextmanager
def _around(way: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way == "report by device clock":
            stack.enter_context(mod_tracker.profile_time(clock="device"))
        yield


def trained(way: str | None, situation: str, costs: dict[str, Any], seed: int) -> list[Any]:
    """The input's gradient and all parameters after the gradients of a few steps, on the host."""
    step, second, _ = SITUATIONS[situation]
    if way is None:
        step = PLAIN.get(situation, step)
    a, b, x = part(seed, ZERO, way), part(seed + 1, second, way), given()
    SIM.simulate(**costs)
    with _around(way):
        for _ in range(1 if situation in PLAIN else STEPS):
            step(a, b, x, seed)
    SIM.synchronize_all()
    torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.01).step()
    SIM.synchronize_all()
    with contextlib.ExitStack() as whole:
        for block in (*a, *b):
            if way in SHARDED:
                whole.enter_context(block.whole_params())
        found = [x.grad, *a.parameters(), *b.parameters()]
        return [each.detach().cpu().clone() for each in found]


def run(way: str, situation: str, seed: int, virtual: bool | None = None) -> Found:
    """Races of one run, and what else was wrong with it."""
    virtual = True if way in SHARDED else virtual
    chosen = schedule(random.Random(f"{seed}/{way}/{situation}"), virtual=virtual)
    costs = chosen | SITUATIONS[situation][2]
    if way in SHARDED or virtual:
        costs |= {"virtual": True}
    SIM.reset()
    try:
        wanted = trained(None, situation, costs, seed)
        SIM.reset()
        found = trained(way, situation, costs, seed)
        gc.collect()
        wrong = "" if same(wanted, found) else "other gradients"
        return SIM.races(), wrong
    except Exception as error:
        return [], f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        SIM.reset()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit, whatever they are cut into."""
    return torch.equal(*(torch.cat([each.flatten() for each in one]) for one in (a, b)))


def run_on_rank(rank: int, cells: list[str], seed: int) -> list[Found]:
    """The same of several cells on one of two ranks."""
    del rank
    return [run(*cell.split("/"), seed) for cell in cells]


def cells_of(ways: Iterable[str]) -> list[str]:
    """Those that are run."""
    return [f"{w}/{s}" for w in ways for s in SITUATIONS if not no_sense(w, s)]


def try_seed(seed: int, cells: list[str]) -> Iterator[tuple[str, Found]]:
    """What a seed finds in each cell."""
    from simdev.ranks import on_ranks

    for cell in cells:
        if cell.split("/")[0] in WAYS:
            yield cell, run(*cell.split("/"), seed)
    sharded = [cell for cell in cells if cell.split("/")[0] in SHARDED]
    if sharded:
        try:
            told = on_ranks(run_on_rank, sharded, seed, limit_s=CELL_S * len(sharded))
        except AssertionError as error:
            if len(sharded) > 1:  # which cell it was, only a run of each can say
                for cell in sharded:
                    yield from try_seed(seed, [cell])
                return
            told = [[([], f"on ranks: {str(error).splitlines()[-1]}")]] * 2
        for cell, *found in zip(sharded, *told, strict=True):
            races = [race for races, _ in found for race in races]
            yield cell, (races, found[0][1] or found[1][1])


def search(seconds: float, seed: int, runs: int | None, cells: list[str]) -> dict[str, Any]:
    """Try what has failed before, then seed after seed; gives counts by cell and what failed."""
    table = {cell: {"runs": 0, "races": 0, "wrong": 0} for cell in cells}
    failures, last = [], seed
    for each, its_cells in _seeds(seconds, seed, runs, cells):
        last = each
        for cell, (races, wrong) in try_seed(each, its_cells):
            counted = table[cell]
            counted["runs"] += 1
            counted["races"] += len(races)
            counted["wrong"] += bool(wrong)
            if races or wrong:
                failures.append(f"seed {each}, {cell}: {wrong or races[0]}")
                print(failures[-1], flush=True)
                seeds.keep(cell, each, wrong or races[0])
    return {"first": seed, "last": last, "cells": table, "failures": failures}


def _seeds(
    seconds: float, first: int, runs: int | None, cells: list[str]
) -> Iterator[tuple[int, list[str]]]:
    for cell, seed in seeds.kept():
        if cell in cells:
            yield seed, [cell]
    seed, end = first, time.monotonic() + seconds
    while seed == first or (time.monotonic() < end and (runs is None or seed < first + runs)):
        yield seed, cells
        seed += 1


def page(result: dict[str, Any]) -> str:
    """The table: runs of a cell, or why there are none; races and wrong gradients where any."""
    tried = f"Seeds {result['first']} to {result['last']}, torch {torch.__version__}."
    lines = [tried, "", "| | " + " | ".join(ALL) + " |", "|---" * (len(ALL) + 1) + "|"]
    for situation in SITUATIONS:
        words = [_word(result["cells"], way, situation) for way in ALL]
        lines.append(f"| {situation} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def _word(cells: dict[str, Any], way: str, situation: str) -> str:
    counted = cells.get(f"{way}/{situation}")
    if counted is None:
        return no_sense(way, situation) or "not run"
    if counted["races"] or counted["wrong"]:
        return f"**{counted['races']} races, {counted['wrong']} wrong of {counted['runs']}**"
    return str(counted["runs"])


def write(path: Path, text: str) -> None:
    """Put the table between its two marks."""
    old = path.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    new = between.sub(lambda _: f"{BEGIN}\n{text}\n{END}", old)
    path.write_text(new, encoding="utf-8")


def main() -> int:
    """Search, write, and exit with 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--only", help="WAY/SITUATION, or all cells of one of them")
    parser.add_argument("--page", type=Path, help="a file with the two marks of the table")
    options = parser.parse_args()
    only = options.only
    cells = [cell for cell in cells_of(ALL) if not only or only in (cell, *cell.split("/"))]
    result = search(options.seconds, options.seed, options.runs, cells)
    text = page(result)
    print(text)
    if options.page:
        write(options.page, text)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
