"""Train a Llama of real size in many ways: ours, torch's and transformers'.

    python -m benchmarks.real --front-page --pages
    python -m benchmarks.real --front-page --json results.json --figure results.svg
    python -m benchmarks.real --front-page --moe --json moe.json --figure moe.svg
    python -m benchmarks.real --model 1b --json results.json
    python -m benchmarks.real --model toy --ways "plain,checkpoint_,fit_*"
    python -m benchmarks.real --list

Each way reports the time of a whole step (forward, backward and the optimizer, if it has one),
tokens per second, the peak memory of a step with parameters and gradients, the memory kept
between forward and backward, and whether its gradients are bit-identical to the plain model's.
Ratios are to the first way of each group.

`--front-page` trains with AdamW, whose learning rate is 0 so that all ways can share parameters:
a Llama of 1B with a vocabulary of 128,256, and 8 layers of Llama 8B's shape at 8k and 32k tokens,
in at most 8 minutes of one GPU. `--pages` writes its tables into README.md and docs/benchmarks.md,
and the figure, unless gradients are wrong. `--moe` has a mixture of experts instead, whose router
draws noise that no checkpoint restores; `--toy` runs the same code at toy size.

Runs with torch, the packages of this repository, and transformers if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read once, when CUDA and the profiler start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
import torch.distributed as dist

from .jobs import batch_shapes, jobs_of
from .measuring import Bench, Row
from .models import MODELS, build_subject
from .pages import check_pages, write_pages
from .results import Run, environment, figure, is_wrong, report
from .ways import REBUILT, WAYS, one_rank

ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, help="default: 1b on an accelerator, toy on a CPU")
    add("--ways", help="names or groups, with commas; * matches any text, ! leaves out")
    add("--tokens", type=batch_shapes, help="such as 2x4096 (sequences x length); commas for more")
    add("--rounds", type=int, help="timed steps of each way")
    add(
        "--seconds-limit",
        type=float,
        help="no round starts after this time, and no way after three quarters of it",
    )
    add("--front-page", action="store_true", help="measure what the front page shows")
    add("--moe", action="store_true", help="with --front-page: a mixture of experts instead")
    add("--toy", action="store_true", help="with --front-page: at toy size, on a CPU")
    add("--json", type=Path, metavar="OUT", help="write results, again after every round")
    add("--figure", type=Path, metavar="SVG", help="draw tokens per second against peak memory")
    add(
        "--pages",
        type=Path,
        nargs="?",
        const=ROOT,
        metavar="ROOT",
        help="with --front-page: write tables and figure into the pages of a checkout; this one",
    )
    add("--llama", choices=("transformers", "script"), help="default: transformers if installed")
    add("--device", help="default: the accelerator; cpu for toy")
    add("--list", action="store_true", help="list the ways")
    options = parser.parse_args(arguments)
    if options.pages is not None and (not options.front_page or options.moe):
        parser.error("--pages writes the results of --front-page without --moe")
    if options.pages is not None and options.toy and options.pages.resolve() == ROOT:
        parser.error("--toy measures nothing for these pages: give --pages a copy of the checkout")
    if options.pages is not None:
        try:
            check_pages(options.pages)
        except ValueError as error:
            parser.error(f"--pages: {error}")
    return options


def device_of(options: argparse.Namespace, name: str) -> torch.device:
    """Return the chosen device; by default the accelerator, or the CPU for toys."""
    kind = options.device
    if kind is None:
        is_cpu = name.startswith("toy") or not torch.accelerator.is_available()
        kind = "cpu" if is_cpu else torch.accelerator.current_accelerator().type
    return torch.device(kind, None if kind == "cpu" else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if gradients that should be equal are not."""
    options, began = parse(arguments), time.monotonic()
    if options.list:
        print("\n".join(f"{one.group:<10}{one.name}" for one in WAYS))
        return 0
    warnings.simplefilter("ignore")
    jobs, runs = jobs_of(options), []
    device = device_of(options, jobs[0].name)
    llama = options.llama or (
        "transformers" if importlib.util.find_spec("transformers") else "script"
    )

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    result: dict[str, Any] = {
        **environment(device, sys.argv[1:] if arguments is None else arguments),
        "llama": llama,
    }

    def write() -> None:
        result["runs"] = [run.to_dict() for run in runs]
        result["seconds"] = round(time.monotonic() - began, 1)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        if options.figure is not None:
            options.figure.write_text(figure(result))

    for index, job in enumerate(jobs):
        if index:
            torch.compiler.reset()
        end = began + sum(each.seconds for each in jobs[: index + 1])
        subject = build_subject(job.shape, llama, job.batch, device)
        run = Run(job, sum(one.numel() for one in subject.model.parameters()), subject.nbytes, [])
        runs.append(run)
        seconds = end - time.monotonic()
        bench = Bench(subject, seconds=seconds, say=say, rebuilt=REBUILT)

        def after_round(rows: list[Row], run: Run = run) -> None:
            run.rows = rows
            write()

        run.rows = bench.run(job.ways, job.rounds, after_round)
        del bench, subject
    if dist.is_initialized():
        dist.destroy_process_group()
        one_rank.cache_clear()
    write()
    print(report(result))
    wrong = any(is_wrong(run, row) for run in runs for row in run.rows)
    if options.pages is not None and not wrong:
        for path in write_pages(result, options.pages):
            say(f"wrote {path}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
