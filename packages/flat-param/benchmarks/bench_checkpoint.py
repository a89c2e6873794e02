"""Time to save and load with checksums, over FSDP2 with torch.distributed.checkpoint.

Two gloo ranks on one machine; parameters and AdamW's moments. Both take turns in one run; wall time
of the first rank, least and median of the rounds. Files are in the page cache when they are loaded.

    python packages/flat-param/benchmarks/bench_checkpoint.py [--mib 150] [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2

import flat_param
from torchparts_conformance.ranks import Ranks

_LAYER_BYTES = 3 * 4 * 1024 * 1024  # a weight and two moments


def trained(shard: Callable[[nn.Module], nn.Module], layers: int) -> tuple[nn.Module, object]:
    """A model in units of one layer and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    for layer in model:
        shard(layer)
    optimizer = torch.optim.AdamW(shard(model).parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    return model, optimizer


def worker(rank: int, world: int, folder: str, mib: int, rounds: int) -> dict[str, list[float]]:
    """One rank: return the seconds of each call."""
    warnings.simplefilter("ignore")
    layers = max(1, (mib << 20) // _LAYER_BYTES)
    ours, theirs = trained(flat_param.fully_shard, layers), trained(fsdp2, layers)

    def states() -> dict[str, object]:
        return dict(zip(("model", "optim"), get_state_dict(*theirs), strict=True))

    def load_theirs(path: str) -> None:
        state = states()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(*theirs, model_state_dict=state["model"], optim_state_dict=state["optim"])

    ways: dict[str, Callable[[str], object]] = {
        "save flat-param": lambda path: flat_param.save_sharded(ours[0], path, optimizer=ours[1]),
        "save FSDP2": lambda path: dcp.save(states(), checkpoint_id=path),
        "load flat-param": lambda path: flat_param.load_sharded(ours[0], path, optimizer=ours[1]),
        "load FSDP2": load_theirs,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, call in ways.items():
            path = f"{folder}/{number}-{name.split()[1]}"
            dist.barrier()
            start = time.perf_counter()
            call(path)
            took[name].append(time.perf_counter() - start)
        dist.barrier()
        if rank == 0:
            for each in Path(folder).iterdir():
                shutil.rmtree(each)
        dist.barrier()
    return took


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as where, contextlib.closing(Ranks("flat_param")) as ranks:
        given = (where, chosen.mib, chosen.rounds)
        took: dict[str, list[float]] = ranks(2, worker, *given, timeout_s=3600)[0]
    print(f"{chosen.mib} MiB on 2 ranks, seconds: least (median)")
    least = {name: min(times[1:]) for name, times in took.items()}
    for name, times in took.items():
        print(f"{name:16s} {least[name]:.3f} ({statistics.median(times[1:]):.3f})")
    for job in ("save", "load"):
        print(f"{job}: {least[f'{job} flat-param'] / least[f'{job} FSDP2']:.2f} of FSDP2's")
