"""How much longer does a training step take under each report, beside torch's own tools?

    python packages/mod-tracker/benchmarks/bench_reports.py --runs 3 --json FILE

Steps that a report looks at operator by operator come first and more and more seldom, so the first
step and a later one are told apart, and the mean is over as many steps as are run. Contexts take
turns in a shuffled order; times are of this thread. `draw_reports.py` draws what is written.
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
from statistics import mean, median

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import profile_flops, profile_memory, profile_time, trace, watch_memory

SIZES = {32: (1, 8, 64, 8), 256: (8, 64, 1024, 3)}
"""By width: batch, tokens, hidden channels, rounds."""
MUST = {
    32: {
        "profile_time": ("later", 1.3),
        "trace": ("later", 1.5),
        "profile_flops": ("later", 1.5),
        "profile_memory": ("later", 2.0),
    },
    256: dict.fromkeys(
        ("profile_time", "trace", "profile_flops", "profile_memory", "watch_memory"),
        ("later", 1.05),
    ),
}
SETTLED = 8
"""Steps after which the next one alike that is looked at is far away."""
STEPS = 15


@contextmanager
def mem_tracker(model: nn.Module) -> Iterator[MemTracker]:
    """torch's MemTracker, which a step must be told the end of."""
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        yield tracker


def contexts(model):
    """What a step is run in, by name, ours first."""
    return {
        "plain": nullcontext,
        "profile_time": profile_time,
        "trace": trace,
        "profile_flops": profile_flops,
        "profile_memory": profile_memory,
        "watch_memory": watch_memory,
        "profile_memory, every step": partial(profile_memory, every_step=True),
        "torch.profiler": partial(profile, activities=[ProfilerActivity.CPU], acc_events=True),
        "torch FlopCounterMode": partial(FlopCounterMode, display=False),
        "torch MemTracker": partial(mem_tracker, model),
    }


def measure(width):
    """One run: by context, times as long as plain steps took, and milliseconds of these."""
    batch, tokens, hidden, rounds = SIZES[width]
    layer = nn.TransformerEncoderLayer(width, 2, hidden, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    x, ways = torch.randn(batch, tokens, width), contexts(model)
    took = {name: [] for name in ways}

    def step(inside):
        start = time.thread_time_ns()
        model(x.clone().requires_grad_()).sum().backward()
        end = time.thread_time_ns()
        if isinstance(inside, MemTracker):
            inside.reset_mod_stats()
        return end - start

    step(None)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            order = list(ways)
            random.Random(number).shuffle(order)
            for name in order:
                with ways[name]() as inside:
                    took[name].append([step(inside) for _ in range(STEPS)])
            gc.collect()
    finally:
        gc.enable()
    plain = median(t for turn in took["plain"] for t in turn)
    rows = {
        name: {
            "first": median(turn[0] for turn in turns) / plain,
            "later": median(t for turn in turns for t in turn[SETTLED:]) / plain,
            "mean": mean(t for turn in turns for t in turn) / plain,
        }
        for name, turns in took.items()
    }
    return rows, plain / 1e6


def in_range(values):
    """The least and the most of several runs."""
    return [round(min(values), 3), round(max(values), 3)]


def measured(runs):
    """Everything that is written: by width, what each context took in all runs."""
    widths = {}
    for width in SIZES:
        found = [measure(width) for _ in range(runs)]
        rows = {
            name: {
                column: in_range([rows[name][column] for rows, _ in found])
                for column in ("first", "later", "mean")
            }
            for name in found[0][0]
        }
        for name, (column, most) in MUST[width].items():
            rows[name]["must"] = {column: most}
        widths[width] = {"plain_ms": in_range([plain for _, plain in found]), "rows": rows}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "runs": runs,
        "steps": STEPS,
        "widths": widths,
    }


def shown(result):
    """The numbers as Markdown tables, a range for each where there is more than one run."""

    def span(low_high):
        low, high = (f"{value:.2f}" for value in low_high)
        return low if low == high else f"{low} to {high}"

    lines = []
    for width, found in result["widths"].items():
        lines += [
            "",
            f"Width {width}, a plain step of {span(found['plain_ms'])} ms; times as long:",
            "",
            "| | first step | later steps | mean of 15 | target |",
            "|---|---|---|---|---|",
        ]
        for name, row in found["rows"].items():
            must = "".join(f"{column} {most}" for column, most in row.get("must", {}).items())
            spans = " | ".join(span(row[column]) for column in ("first", "later", "mean"))
            lines.append(f"| {name} | {spans} | {must} |")
    return "\n".join(lines)


def main():
    """Measure, print, and write what `--json` names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    result = measured(options.runs)
    print(shown(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
