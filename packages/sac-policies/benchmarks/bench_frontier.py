"""Which bytes can be had for which time: the front of each way to keep less for backward.

Stacks of eight blocks, one way after the other in one process, in rounds that turn; a point is
what the allocator holds after a forward, and the median of a step's time over that of no
checkpointing in the same round. `bench_models.py` measures other people's models.

    python bench_frontier.py --runs 2 --json frontier.json
    python bench_frontier.py --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from bench_region import keep_freed_memory
from frontier_blocks import BLOCKS
from frontier_fits import Region, Stack, at_the_peak_of, divided, plainly
from frontier_times import in_turn, over_the_first, seconds_of
from frontier_ways import COSTLY, FULL, kept_bytes, torchs_selective, under
from torch import nn

import sac_policies

COUNT = 8
BUDGETS = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
OURS, FITTED, KEPT = "sac-policies, solve", "sac-policies, fit_", "sac-policies, fit_ of kept bytes"
EVERY, SELECTIVE = "torch, every k-th block", "torch, selective"


class Bench:
    """A stack of blocks, its input, and steps over it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        kind, shape = BLOCKS[name]
        self.device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        self.blocks = nn.ModuleList(kind() for _ in range(COUNT)).to(self.device, dtype)
        self.x = torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True)
        self.leaves = [self.x, *self.blocks.parameters()]

    def forward(self, stack: Stack) -> torch.Tensor:
        torch.manual_seed(1)
        x = self.x
        for block, region in zip(self.blocks, stack, strict=True):
            x = region(block, x)
        return x

    def step(self, stack: Stack) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.forward(stack).sum(), self.leaves))

    def seconds(self, stack: Stack) -> float:
        return seconds_of(lambda: self.step(stack), self.device)

    def kept(self, stack: Stack) -> int:
        gc.collect()
        return kept_bytes(lambda: self.forward(stack), self.device)


def ways(bench: Bench) -> dict[str, list[tuple[str, Stack]]]:
    """By way: its points, each with what was asked for."""
    block = bench.blocks[0]
    bench.forward([under(policy=sac_policies.recompute_all())] * COUNT)
    x = bench.x.detach().requires_grad_()
    traced = sac_policies.profile(block, x, repeats=5)
    plans = {budget: sac_policies.solve(traced, budget) for budget in BUDGETS}
    found: dict[str, list[tuple[str, Stack]]] = {
        "none": [("", [plainly] * COUNT)],
        OURS: [(f"{b:.0%}", [under(policy=p)] * COUNT) for b, p in plans.items() if p],
        "sac-policies, by operator": [
            ("nothing", [under(policy=sac_policies.recompute_all())] * COUNT),
            ("products", [under(policy=COSTLY)] * COUNT),
        ],
        EVERY: [(f"{n}", [FULL] * n + [plainly] * (COUNT - n)) for n in range(1, COUNT + 1)],
        SELECTIVE: [("products", [torchs_selective(COSTLY)] * COUNT)],
        "torch, compiled budget": [(f"{b:.0%}", [compiled(b)] * COUNT) for b in BUDGETS],
        KEPT: [
            (asked, stack)
            for asked, stack in divided(bench.blocks, bench.x, BUDGETS).items()
            if stack
        ],
    }
    others = [point for way in (EVERY, SELECTIVE) for point in found[way]]
    fitted = [(asked, at_the_peak_of(stack, bench.blocks, bench.x)) for asked, stack in others]
    found[FITTED] = [(asked, stack) for asked, stack in fitted if stack]
    return found


def compiled(budget: float) -> Region:
    """Partition a block's joint graph by torch's memory budget, and run it in eager code.

    Each budget compiles code of its own. Of what was compiled for the same code the compiler
    takes what its guards let through, and the budget is none of them: one budget's calls would
    run what another one was compiled to.
    """

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    alone = types.FunctionType(run.__code__.replace(), run.__globals__)
    made = torch.compile(alone, backend="aot_eager_decomp_partition", fullgraph=True)

    def within(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return made(block, x)

    return within


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Points of every way for one kind of block."""
    bench = Bench(name, options)
    points = [
        (way, asked, stack) for way, several in ways(bench).items() for asked, stack in several
    ]
    plain = bench.step(points[0][2])
    rows: list[dict[str, Any]] = []
    for way, asked, stack in points:
        bench.step(stack)  # the first forward of a function is watched, compiled code is compiled
        same = all(map(torch.equal, plain, bench.step(stack)))
        rows.append({"way": way, "asked": asked, "bytes": bench.kept(stack), "bitwise": same})
    clocked = [functools.partial(bench.seconds, stack) for *_, stack in points]
    ratios = over_the_first(in_turn(clocked, options.rounds))
    for row, ratio, point in zip(rows, ratios, points, strict=True):
        row["time"] = ratio
        kept = bench.kept(point[2])
        if kept != row["bytes"]:
            way = f"{name}, {row['way']} {row['asked']}"
            raise RuntimeError(f"{way}: {row['bytes']} bytes kept, and {kept} after it was timed")
    return {"block": name, "rows": rows}


def joined(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs side by side: bytes of the last, times as ranges."""
    for at, kind in enumerate(runs[-1]):
        for number, row in enumerate(kind["rows"]):
            several = [run[at]["rows"][number]["time"] for run in runs]
            row["time"] = [min(several), max(several)]
    return runs[-1]


def main() -> None:
    """Measure, print a row a point, and write them where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="at least")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--block", choices=BLOCKS, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.cache_size_limit = 64
    keep_freed_memory()
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": options.device,
        "count": COUNT,
    }
    runs = [
        [measured(name, options) for name in options.block or BLOCKS] for _ in range(options.runs)
    ]
    result["runs"], result["blocks"] = options.runs, joined(runs)
    for kind in result["blocks"]:
        for row in kind["rows"]:
            print(json.dumps({"block": kind["block"], **row}))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
