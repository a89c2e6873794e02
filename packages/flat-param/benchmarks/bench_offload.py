"""What does optimizer state elsewhere cost in a step, and how much memory does it leave free?

One rank, layers of 1024 x 1024, fused AdamW. Configurations train the same model in rounds that
take turns: medians of a step and of the optimizer's part of it, and of their ratios to state in
place. Memory, in a process of each one's own: the most that a step has beside what was there before
there was any state. On a device it is counted by its allocator;
on the CPU it is the process's own resident memory (RssAnon of /proc), looked at all the time, which
leaves out the pages of files that the system may drop.

    python packages/flat-param/benchmarks/bench_offload.py [--device cuda] [--layers 16]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import flat_param

WIDTH, ROWS, MIB = 1024, 64, 1 << 20
BUCKET_NUMEL = WIDTH * (WIDTH + 1)  # a layer
PLACES = ("in place", "CPU memory", "folder")
TABLE = "{:<11} {:>9} {:>6} {:>14} {:>6} {:>15}"


def made(layers: int, device: str) -> nn.Module:
    """A sharded stack of layers, one unit each."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).to(device)
    for layer in model:
        flat_param.fully_shard(layer)
    return flat_param.fully_shard(model)


def optimizer_of(model: nn.Module, place: str, folder: str) -> torch.optim.Optimizer:
    """Fused, so that it has no memory of its own beside its state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if place == "in place":
        return optimizer
    where = folder if place == "folder" else None
    return flat_param.offload_optimizer(optimizer, folder=where, bucket_numel=BUCKET_NUMEL)


def backward(model: nn.Module, device: str) -> None:
    """Gradients of one batch."""
    model(torch.ones(ROWS, WIDTH, device=device)).square().mean().backward()


def timed(call: Callable[[], Any], device: str) -> float:
    """Milliseconds."""
    if device != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) * 1e3


def _resident() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def most_during(call: Callable[[], Any], device: str, before: int) -> int:
    """Bytes beyond `before` that there are at most while something is called."""
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        call()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - before
    seen, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.0003):
            seen.append(_resident())

    looking = threading.Thread(target=look)
    looking.start()
    call()
    over.set()
    looking.join()
    return max(seen) - before


def now(device: str) -> int:
    """Bytes that there are."""
    return _resident() if device == "cpu" else torch.accelerator.memory_allocated()


def memory(place: str, layers: int, device: str, folder: str) -> int:
    """The most that steps have of state, bytes."""
    model = made(layers, device)
    optimizer = optimizer_of(model, place, folder)
    backward(model, device)
    before = now(device)
    return max(most_during(optimizer.step, device, before) for _ in range(4))


def compare(places: tuple[str, ...], layers: int, device: str, folder: str, rounds: int) -> None:
    """Print the table."""
    models = {place: made(layers, device) for place in places}
    optimizers = {place: optimizer_of(models[place], place, folder) for place in places}
    steps: dict[str, list[float]] = {place: [] for place in places}
    parts: dict[str, list[float]] = {place: [] for place in places}
    for turn in range(rounds + 2):
        for place in places:
            optimizers[place].zero_grad()
            first = timed(lambda place=place: backward(models[place], device), device)
            own = timed(optimizers[place].step, device)
            if turn > 1:  # the first ones make state and find pages
                steps[place].append(first + own)
                parts[place].append(own)
    print(TABLE.format("state", "step, ms", "ratio", "optimizer, ms", "ratio", "MiB of state"))
    for place in places:
        ratios = []
        for each in (steps, parts):
            pairs = zip(each[place], each["in place"], strict=True)
            ratios.append(statistics.median(own / base for own, base in pairs))
        argv = [sys.executable, __file__, "--device", device, "--layers", str(layers)]
        found = subprocess.run(
            [*argv, "--memory-of", place],
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is gone at once
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        print(
            TABLE.format(
                place,
                f"{statistics.median(steps[place]):.1f}",
                f"{ratios[0]:.2f}",
                f"{statistics.median(parts[place]):.1f}",
                f"{ratios[1]:.2f}",
                f"{int(found.split()[-1]) / MIB:.1f}",
            )
        )


def main() -> None:
    """Parse, and do either thing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--memory-of", choices=PLACES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.memory_of:
            print(memory(given.memory_of, given.layers, given.device, folder))
        else:  # what is on the CPU stays as it is in CPU memory
            places = PLACES if given.device != "cpu" else ("in place", "folder")
            compare(places, given.layers, given.device, folder, given.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
