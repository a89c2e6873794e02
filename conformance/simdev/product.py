"""Every way of saving memory in every situation of a device, on random schedules.

`python -m simdev product.py --seconds 60 --seed 0 --out RESULT.json`, from this folder. A run has a
seed, which says how long everything takes; each seed is tried in every cell, until the time is
over. What fails is printed with its seed, and `--only WAY/SITUATION --seed N --runs 1` repeats it.
A run is right if the gradients are plain's, bit for bit, and no race was reported.

Unfinished: cells of offload on several devices have hung (see STILL), and one more hang has no
known cause, so no session runs this, and there is no table. Sharded modules are not in it yet.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flat_param
import mod_tracker
import sac_policies
from ckpt_wrap import checkpoint_, offload_

WIDTH, ROWS = 32, 64
Model = Callable[[torch.Tensor], torch.Tensor]
SIM: Any = torch.get_device_module("simdev")
OFFLOADED = ("aten.addmm", "aten.gelu")


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """(rows, width) to the same."""
        return self.down(nn.functional.gelu(self.up(x)))


class Region(nn.Module):
    """A block in a checkpoint of sac-policies."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x):
        """As the block."""
        return sac_policies.checkpoint(self.block, x, **self.options)


def _recipe(block):
    return Region(block, policy=sac_policies.recompute_all(), engine="recipe")


def _contexts(block):
    return Region(block, policy=sac_policies.offload(*OFFLOADED), engine="contexts")


def _flat(block):
    flat_param.flatten(block)
    return block


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "offload": offload_,
    "offload, two calls kept": lambda block: offload_(block, keep_last=2),
    "checkpoint + offload": lambda block: offload_(checkpoint_(block)),
    "offload in contexts": _contexts,
    "recipes": _recipe,
    "flat views": _flat,
    "report by device clock": lambda block: block,
}
HAVE_COPIES = {"offload", "checkpoint + offload", "offload in contexts"}


def part(seed: int, where: torch.device, way: str | None) -> nn.Sequential:
    """Three blocks on a device, plain or changed."""
    torch.manual_seed(seed)
    blocks = [Block().to(where) for _ in range(3)]
    return nn.Sequential(*(WAYS[way](block) if way else block for block in blocks))


def given(where: torch.device, shift: float = 0) -> torch.Tensor:
    """An input whose gradient is wanted."""
    flat = torch.linspace(-1 + shift, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    return flat.to(where).requires_grad_()


ZERO, ONE = torch.device("simdev", 0), torch.device("simdev", 1)


def _one(a, b, x):
    b(a(x)).square().sum().backward()


def _two_devices(a, b, x):
    b(a(x).to(ONE)).square().sum().backward()


def _two_streams(a, b, x):
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    h = a(x)
    side.wait_stream(main)
    h.record_stream(side)
    with side:
        z = b(h)
    main.wait_stream(side)
    z.record_stream(main)
    z.square().sum().backward()
    main.wait_stream(side)


def _side_stream(a, b, x):
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    side.wait_stream(main)
    with side:
        _one(a, b, x)
    main.wait_stream(side)


def _two_threads(a, b, x):
    (a(x).square().sum() + b(x.to(ONE)).square().sum().to(ZERO)).backward()


def _pipeline(a, b, x):
    losses = [b(a(x * scale).to(ONE)).square().sum() for scale in (1.0, 0.5, 0.25)]
    while losses:
        losses.pop(0).backward()


def _out_of_memory(a, b, x):
    with contextlib.suppress(RuntimeError):
        SIM.limit(SIM.memory_reserved(0) + 40_000, 0)
        _one(a, b, x)
    _again(a, b, x)


def _failing_copy(a, b, x):
    SIM.fail_later("copy to host", 3)
    with contextlib.suppress(RuntimeError):
        _one(a, b, x)
        SIM.synchronize_all()
    with contextlib.suppress(RuntimeError):
        SIM.synchronize_all()
    SIM.fail_later("", 0)
    _again(a, b, x)


def _again(a, b, x):
    SIM.limit(None, 0)
    SIM.synchronize_all()
    for tensor in (x, *a.parameters(), *b.parameters()):
        tensor.grad = None
    gc.collect()
    _one(a, b, x)


# A host whose virtual time moves hangs where several threads ask events: `Event::query` keeps the
# interpreter's lock until the event is done. So where there are two devices it stands still.
STILL = {"host_us": 0, "queue_limit": 0}

# What is run, where its second part lies, and what is fixed of the schedule.
SITUATIONS: dict[str, tuple[Callable[..., None], torch.device, dict[str, Any]]] = {
    "one device": (_one, ZERO, {}),
    "two devices": (_two_devices, ONE, STILL),
    "two streams": (_two_streams, ZERO, {}),
    "two backward threads": (_two_threads, ONE, STILL),
    "side stream": (_side_stream, ZERO, {}),
    "micro-batches": (_pipeline, ONE, STILL),
    "host far ahead": (_one, ZERO, {"virtual": True, "host_us": 0, "queue_limit": 0}),
    "slow copies": (_two_streams, ZERO, {"virtual": True, "kernel_us": 10, "copy_us": 5000}),
    "jitter": (_two_streams, ZERO, {"virtual": False, "jitter": True}),
    "out of memory": (_out_of_memory, ZERO, {}),
    "failing copy": (_failing_copy, ZERO, {}),
}


def no_sense(way: str, situation: str) -> str:
    """Why a cell is not run, in a few words; empty where it is."""
    if situation == "failing copy" and way not in HAVE_COPIES:
        return "no copies"
    return ""


def schedule(chosen: random.Random) -> dict[str, Any]:
    """How long things take, microseconds; real time is kept short."""
    virtual = chosen.random() < 0.6
    return {
        "virtual": virtual,
        "kernel_us": chosen.choice((0, 20, 100) if virtual else (0, 20)),
        "copy_us": chosen.choice((0, 50, 1000, 5000) if virtual else (0, 50, 300)),
        "host_us": chosen.choice((0, 0, 5, 50)) if virtual else 0,
        "queue_limit": chosen.choice((0, 0, 4, 32)),
        "jitter": chosen.random() < 0.5,
    }


@contextlib.contextmanager
def _around(way: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way == "report by device clock":
            stack.enter_context(mod_tracker.profile_time(clock="device"))
        yield


def gradients(way: str | None, situation: str, costs: dict[str, Any], seed: int):
    """Two steps' gradients on the host; a flat parameter's come by its views."""
    step, second, _ = SITUATIONS[situation]
    a, b, x = part(seed, ZERO, way), part(seed + 1, second, way), given(ZERO)
    SIM.simulate(**costs)
    with _around(way):
        for _ in range(2):
            step(a, b, x)
    SIM.synchronize_all()
    found = [x.grad, *_gradients_of(a), *_gradients_of(b)]
    return [torch.cat([each.cpu().flatten() for each in found])]


def _gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def run(way: str, situation: str, seed: int) -> tuple[list[str], str]:
    """Races of one run, and what else was wrong with it."""
    costs = schedule(random.Random(f"{seed}/{way}/{situation}")) | SITUATIONS[situation][2]
    SIM.reset()
    try:
        wanted = gradients(None, situation, copy.copy(costs), seed)
        SIM.reset()
        found = gradients(way, situation, costs, seed)
        gc.collect()
        wrong = "" if all(map(torch.equal, wanted, found)) else "other gradients"
        return SIM.races(), wrong
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    finally:
        SIM.reset()


def search(seconds: float, seed: int, runs: int | None, only: str | None) -> dict[str, Any]:
    """Try seed after seed in every cell; gives counts by cell and what failed."""
    cells = [f"{way}/{situation}" for way in WAYS for situation in SITUATIONS]
    table = {cell: {"runs": 0, "races": 0, "wrong": 0} for cell in cells}
    failures, end, first = [], time.monotonic() + seconds, seed
    chosen = [c for c in cells if not no_sense(*c.split("/")) and only in (None, c)]
    while time.monotonic() < end and (runs is None or seed < first + runs):
        for cell in chosen:
            races, wrong = run(*cell.split("/"), seed)
            counted = table[cell]
            counted["runs"] += 1
            counted["races"] += len(races)
            counted["wrong"] += bool(wrong)
            if races or wrong:
                failures.append({"cell": cell, "seed": seed, "what": wrong or races[0]})
                print(f"seed {seed}, {cell}: {wrong or races[0]}", flush=True)
        seed += 1
    return {"first_seed": first, "last_seed": seed - 1, "cells": table, "failures": failures}


def page(result: dict[str, Any]) -> str:
    """The table: runs of a cell, or why there are none; races and wrong gradients where any."""
    lines = ["| | " + " | ".join(SITUATIONS) + " |", "|---" * (len(SITUATIONS) + 1) + "|"]
    for way in WAYS:
        words = [no_sense(way, each) or _word(result, way, each) for each in SITUATIONS]
        lines.append(f"| {way} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def _word(result: dict[str, Any], way: str, situation: str) -> str:
    counted = result["cells"][f"{way}/{situation}"]
    if counted["races"] or counted["wrong"]:
        return f"**{counted['races']} races, {counted['wrong']} wrong of {counted['runs']}**"
    return str(counted["runs"])


def main() -> int:
    """Search, write, and exit with 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = search(options.seconds, options.seed, options.runs, options.only)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(page(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
