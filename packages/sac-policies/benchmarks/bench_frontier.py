"""Which bytes can be had for which time: the front of each way to keep less for backward.

Stacks of eight blocks, one way after the other in one process, in rounds that turn; a point is
what the allocator holds after a forward, and the median of a step's time over that of no
checkpointing in the same round. `--models` counts bytes, budgets and gradients of other people's
models instead, where their libraries are installed (see `downstream/`).

    python bench_frontier.py --runs 2 --json frontier.json
    python bench_frontier.py --models --json models.json
    python bench_frontier.py --models --model Mixtral --budgets
    python bench_frontier.py --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from bench_recipe import keep_freed_memory
from frontier_blocks import BLOCKS
from frontier_fits import Region, Stack, at_the_peak_of, divided, plainly
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sac_policies
from sac_policies import ATTENTION, CONVOLUTIONS, MATMULS

COUNT = 8
BUDGETS = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
COSTLY = sac_policies.save_ops(MATMULS, ATTENTION, CONVOLUTIONS)
OURS, FITTED, KEPT = "sac-policies, solve", "sac-policies, fit_", "sac-policies, fit_ of kept bytes"
EVERY, SELECTIVE = "torch, every k-th block", "torch, selective"


def torchs_selective(kept: sac_policies.Policy) -> Region:
    """Run a region under torch's selective checkpointing, with the same operators kept."""
    keeps = functools.cache(lambda op: f"{kept.constant(op)}".endswith("SAVE"))

    def decide(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
        return save if keeps(op) else again

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def under(**settings: Any) -> Region:
    """Run a region under this package."""
    return functools.partial(sac_policies.checkpoint, **settings)


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
        clock = time.thread_time if self.device.type == "cpu" else time.perf_counter
        gc.disable()
        self._wait()
        began = clock()
        self.step(stack)
        self._wait()
        spent = clock() - began
        gc.enable()
        return spent

    def kept(self, stack: Stack) -> int:
        gc.collect()
        return kept_bytes(lambda: self.forward(stack), self.device)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def kept_bytes(forward: Callable[[], torch.Tensor], device: torch.device) -> int:
    """What the allocator holds after a forward, its output included."""
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as p:
            out = forward()
        size = sum(event.self_cpu_memory_usage for event in p.key_averages())
    else:
        before = torch.accelerator.memory_allocated()
        out = forward()
        size = torch.accelerator.memory_allocated() - before
    del out
    return int(size)


def ways(bench: Bench) -> dict[str, list[tuple[str, Stack]]]:
    """By way: its points, each with what was asked for."""
    block, full = bench.blocks[0], functools.partial(checkpoint, use_reentrant=False)
    bench.forward([under(policy=sac_policies.recompute_all(), engine="recipe")] * COUNT)
    x = bench.x.detach().requires_grad_()
    traced = sac_policies.profile(block, x, repeats=5)
    plans = {budget: sac_policies.solve(traced, budget) for budget in BUDGETS}
    found: dict[str, list[tuple[str, Stack]]] = {
        "none": [("", [plainly] * COUNT)],
        OURS: [(f"{b:.0%}", [under(policy=p)] * COUNT) for b, p in plans.items() if p],
        "sac-policies, by operator": [
            ("nothing", [under(policy=sac_policies.recompute_all(), engine="recipe")] * COUNT),
            ("products", [under(policy=COSTLY, engine="recipe")] * COUNT),
        ],
        EVERY: [(f"{n}", [full] * n + [plainly] * (COUNT - n)) for n in range(1, COUNT + 1)],
        SELECTIVE: [("products", [torchs_selective(COSTLY)] * COUNT)],
        "torch, compiled budget": [(f"{b:.0%}", [compiled(b)] * COUNT) for b in BUDGETS[::2]],
        KEPT: [
            (asked, stack)
            for asked, stack in divided(bench.blocks, bench.x, BUDGETS).items()
            if stack
        ],
    }
    found[FITTED] = [
        (asked, at_the_peak_of(stack, bench.blocks, bench.x))
        for way in (EVERY, SELECTIVE)
        for asked, stack in found[way]
    ]
    return found


def compiled(budget: float) -> Region:
    """Partition a block's joint graph by torch's memory budget, and run it in eager code."""
    made: dict[int, Region] = {}

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            if id(block) not in made:
                torch._dynamo.reset()
                made[id(block)] = torch.compile(block, backend="aot_eager_decomp_partition")
            return made[id(block)](x)

    return run


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Points of every way for one kind of block."""
    bench = Bench(name, options)
    points = [
        (way, asked, stack) for way, several in ways(bench).items() for asked, stack in several
    ]
    plain = bench.step(points[0][2])
    rows, times = [], [[] for _ in points]
    for way, asked, stack in points:
        bench.step(stack)  # the first forward of a function is watched, compiled code is compiled
        same = all(map(torch.equal, plain, bench.step(stack)))
        rows.append({"way": way, "asked": asked, "bytes": bench.kept(stack), "bitwise": same})
    order = list(range(len(points)))
    for _ in range(options.rounds):
        for at in order:
            times[at].append(bench.seconds(points[at][2]))
        order.reverse()
    for row, spent in zip(rows, times, strict=True):
        ratios = [own / none for own, none in zip(spent, times[0], strict=True)]
        row["time"] = round(statistics.median(ratios), 3)
    return {"block": name, "rows": rows}


def joined(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs side by side: bytes of the last, times as ranges."""
    for at, kind in enumerate(runs[-1]):
        for number, row in enumerate(kind["rows"]):
            several = [run[at]["rows"][number]["time"] for run in runs]
            row["time"] = [min(several), max(several)]
    return runs[-1]


def model_row(case: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Kept bytes of one model by way, and what budgets can be had."""
    from _models import without_cache

    def made(region: Region | None) -> nn.Module:
        (model,) = without_cache(case.build())
        for block in case.outer_blocks_of(model).values() if region else ():
            block.forward = functools.partial(region, block.forward)
        return model

    def gradients(model: nn.Module) -> list[torch.Tensor | None]:
        model.zero_grad()
        case.loss(model).backward()
        return [parameter.grad for parameter in model.parameters()]

    regions: dict[str, Region | None] = {
        "none": None,
        "full": functools.partial(checkpoint, use_reentrant=False),
        "nothing": under(policy=sac_policies.recompute_all(), engine="recipe"),
        "selective": torchs_selective(COSTLY),
        "products": under(policy=COSTLY, engine="recipe"),
    }
    row: dict[str, Any] = {"model": case.name, "bytes": {}, "bitwise": {}}
    plain = gradients(made(None))
    for way, region in regions.items():
        model = made(region)
        try:
            gradients(model)
            same = all(
                (a is None and b is None) or torch.equal(a, b)
                for a, b in zip(gradients(model), plain, strict=True)
            )
            model.zero_grad()
            row["bytes"][way] = kept_bytes(lambda: case.loss(model), torch.device("cpu"))  # noqa: B023
            row["bitwise"][way] = same
        except RuntimeError as error:
            row["bytes"][way] = None
            row[f"{way} raises"] = f"{error}".partition("\n")[0]
    sizes = row["bytes"]
    row["freed"] = round((sizes["none"] - sizes["nothing"]) / (sizes["none"] - sizes["full"]), 4)
    row["budgets"] = {asked: fitted(case, made(None), asked) for asked in options.budgets}
    row["full peak"] = round(peak(case, made(regions["full"])) / peak(case, made(None)), 3)
    return row


def peak(case: Any, model: nn.Module) -> int:
    """Bytes that a step of a model takes at most."""
    found = sac_policies.fit_(model, case.inputs(), "100%")
    return int(found.plain_bytes)


def fitted(case: Any, model: nn.Module, asked: str) -> dict[str, Any]:
    """What `fit_` finds for a budget; how far its prediction is off, in percent."""
    found = sac_policies.fit_(model, case.inputs(), asked)
    if not found:
        return {"fits": False, "least": found.smallest_bytes, "budget": found.budget_bytes}
    share = found.peak_bytes / found.plain_bytes
    off = 100 * (found.predicted_bytes / found.peak_bytes - 1)
    told = {
        "fits": True,
        "share": round(share, 3),
        "steps": len(found.rounds),
        "off": round(off, 2),
    }
    found.undo()
    return told


def models(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model of `downstream/` that can be made here."""
    root = Path(__file__).resolve().parents[3] / "downstream"
    sys.path[:0] = [str(root), str(root / "models")]
    import _parts
    import pytest
    from _cases import CASES

    _parts.COPIES = options.copies
    rows = []
    for case in CASES:
        if options.model and case.name not in options.model:
            continue
        if importlib.util.find_spec(case.library) is None:
            print(f"{case.name}: {case.library} is not installed")
            continue
        try:
            rows.append(model_row(_parts.enlarged(case), options))
        except pytest.skip.Exception as reason:
            print(f"{case.name}: {reason}")
            continue
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure, print a row a point, and write them where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", action="store_true", help="other people's models, by count")
    parser.add_argument("--model", action="append", help="only this one, by its name")
    parser.add_argument("--copies", type=int, default=32, help="of each model's batch")
    parser.add_argument("--budgets", nargs="*", default=["80%", "60%"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
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
    if options.models:
        result["copies"], result["models"] = options.copies, models(options)
    else:
        runs = [
            [measured(name, options) for name in options.block or BLOCKS]
            for _ in range(options.runs)
        ]
        result["runs"], result["blocks"] = options.runs, joined(runs)
        for kind in result["blocks"]:
            for row in kind["rows"]:
                print(json.dumps({"block": kind["block"], **row}))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
