"""How much host time does each unit add to a step, beside torch's own?

400 units of one small layer each compute almost nothing, so a step takes as long as the host needs
for its units. Printed: thread CPU time of forward and backward over that of the plain model, for
each unit; the median of rounds that take turns. One rank uses gloo. Of more, one rank runs with
torch's fake process group, whose collectives do nothing: what gloo does is no part of it.

    python packages/flat-param/benchmarks/bench_units.py [--world 1] [--rounds 15] [--units 400]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import flat_param

WIDTH = 16


def build(units: int) -> nn.Sequential:
    """A model of small layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units)))


def times(world: int, units: int, rounds: int) -> dict[str, float]:
    """Microseconds for each unit of a step, by candidate."""
    models = {"plain": build(units)}
    mesh = dist.init_device_mesh("cpu", (world,))
    for name, shard in (("flat-param", flat_param.fully_shard), ("FSDP2", torch_fully_shard)):
        models[name] = build(units)
        for module in (*models[name], models[name]):
            shard(module, mesh=mesh)
    batch = torch.randn(4, WIDTH)
    found: dict[str, list[float]] = {name: [] for name in models}
    for at in range(-3, rounds):
        for name, model in models.items():
            taken = step(model, batch)
            if at >= 0:
                found[name].append(taken)
    return {name: statistics.median(each) / units * 1e6 for name, each in found.items()}


def step(model: nn.Module, batch: Tensor) -> float:
    """Seconds of a forward and backward."""
    start = time.thread_time()
    model(batch).sum().backward()
    taken = time.thread_time() - start
    model.zero_grad()
    return taken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--units", type=int, default=400)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if chosen.world == 1:
            store = dist.FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        else:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=chosen.world)
        found = times(chosen.world, chosen.units, chosen.rounds)
        dist.destroy_process_group()
    ours, torchs = (found[name] - found["plain"] for name in ("flat-param", "FSDP2"))
    print(f"{chosen.units} units on one of {chosen.world} ranks, us per unit over plain")
    print(f"flat-param {ours:.0f}, FSDP2 {torchs:.0f}: {ours / torchs:.2f}")
