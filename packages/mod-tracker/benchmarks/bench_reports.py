"""Duration of a training step under each report, and under torch's own tools.

    python packages/mod-tracker/benchmarks/bench_reports.py --rounds 5 --json FILE

Each round runs one step in every context, including entry and exit, in a shuffled order. Times are
thread-CPU times, medians over rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import profile_flops, profile_memory, profile_time, trace, watch_memory

SIZES = {32: (1, 8, 64), 256: (8, 64, 1024)}
"""By width: batch, tokens, hidden channels."""
MUST = {
    32: {"profile_time": 2.0, "trace": 2.0},
    256: {"profile_time": 1.05, "trace": 1.05, "profile_flops": 1.2, "profile_memory": 1.25},
}


@contextmanager
def mem_tracker(model: nn.Module) -> Iterator[MemTracker]:
    """Make torch's MemTracker with the model's parameters."""
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        yield tracker


def contexts(model):
    """Return the contexts to measure by name, ours first."""
    return {
        "plain": nullcontext,
        "profile_time": profile_time,
        "trace": trace,
        "profile_flops": profile_flops,
        "profile_memory": profile_memory,
        "watch_memory": watch_memory,
        "torch.profiler": partial(profile, activities=[ProfilerActivity.CPU], acc_events=True),
        "torch FlopCounterMode": partial(FlopCounterMode, display=False),
        "torch MemTracker": partial(mem_tracker, model),
    }


def measure(width, rounds):
    """Return milliseconds per step by context."""
    batch, tokens, hidden = SIZES[width]
    layer = nn.TransformerEncoderLayer(width, 2, hidden, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    x, ways = torch.randn(batch, tokens, width), contexts(model)
    took = {name: [] for name in ways}

    def step(way):
        given = x.clone().requires_grad_()
        start = time.thread_time_ns()
        with way():
            model(given).sum().backward()
        return (time.thread_time_ns() - start) / 1e6

    for way in ways.values():  # warm up: the first use loads and caches
        step(way)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            order = list(ways)
            random.Random(number).shuffle(order)
            for name in order:
                took[name].append(step(ways[name]))
            gc.collect()
    finally:
        gc.enable()
    return {name: median(times) for name, times in took.items()}


def measured(rounds):
    """Return the results: by width, the plain step, and each context's time relative to it."""
    widths = {}
    for width in SIZES:
        took = measure(width, rounds)
        rows = {name: {"times": round(ms / took["plain"], 3)} for name, ms in took.items()}
        for name, most in MUST[width].items():
            rows[name]["must"] = most
        widths[width] = {"plain_ms": round(took["plain"], 3), "rows": rows}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "rounds": rounds,
        "widths": widths,
    }


def shown(result):
    """Format the results as Markdown tables."""
    lines = []
    for width, found in result["widths"].items():
        lines += [
            "",
            f"Width {width}, a plain step of {found['plain_ms']:.2f} ms:",
            "",
            "| | times as long | target |",
            "|---|---|---|",
        ]
        for name, row in found["rows"].items():
            lines.append(f"| {name} | {row['times']:.2f} | {row.get('must', '')} |")
    return "\n".join(lines)


def main():
    """Measure, print, and write the file named by `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    result = measured(options.rounds)
    print(shown(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
