"""What does making 300 parameters whole and freeing them again cost the host, beside torch's own?

One module of 300 small parameters is one unit. Each candidate makes its parameters whole, puts
them in the module, and frees them again, in rounds that take turns. Time is CPU time of the thread
that asks for it, the least of all rounds, less that of the bare all-gather of the same bytes; what
gloo does in its own threads is no part of it.

    python packages/flat-param/benchmarks/bench_unshard.py [--world 2] [--rounds 60]
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from _models import many_parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _flat_param as torch_flat_param
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._common_utils import HandleTrainingState

import flat_param
from torchparts_conformance.ranks import Ranks

WIDTH = 32
Step = Callable[[], None]


def build() -> nn.Module:
    """300 parameters of 0.16M elements."""
    return nn.Sequential(many_parameters(WIDTH))


def ours() -> Step:
    """A FULL_SHARD unit."""
    unit = flat_param.fully_shard(build())._flat_param

    def cycle() -> None:
        unit.begin()
        unit.reshard()

    return cycle


def fsdp1(*, use_orig_params: bool) -> Step:
    """The handle that FullyShardedDataParallel drives."""
    module = build()
    handle = torch_flat_param.FlatParamHandle(
        list(module.parameters()),
        module,
        torch.device("cpu"),
        torch_flat_param.HandleShardingStrategy.FULL_SHARD,
        False,
        None,
        None,
        False,
        dist.group.WORLD,
        use_orig_params,
    )
    handle.shard()
    handle.init_flat_param_attributes()
    handle._training_state = HandleTrainingState.FORWARD  # so that it puts views in the module

    def cycle() -> None:
        handle.pre_unshard()
        handle.unshard()
        handle.post_unshard()
        handle.reshard(True)
        handle.post_reshard()

    return cycle


def fsdp2() -> Step:
    """torch's own fully_shard."""
    module = torch_fully_shard(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def cycle() -> None:
        module.unshard()
        module.reshard()

    return cycle


def bare(numel: int) -> Step:
    """The collective alone."""
    world = dist.get_world_size()
    shard = torch.zeros(-(-numel // world))
    full = torch.zeros(shard.numel() * world)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather(full, shard)


def worker(rank: int, world: int, rounds: int) -> tuple[dict[str, float], int]:
    """One rank: every candidate in turn; return microseconds, and the number of parameters."""
    warnings.simplefilter("ignore")
    params = list(build().parameters())
    steps = {
        "bare all-gather": bare(sum(param.numel() for param in params)),
        "flat-param": ours(),
        "FSDP1 handle, flat": fsdp1(use_orig_params=False),
        "FSDP1 handle, orig": fsdp1(use_orig_params=True),
        "FSDP2": fsdp2(),
    }
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.thread_time()
            step()
            least[name] = min(least[name], (time.thread_time() - start) * 1e6)
    return least, len(params)


def report(least: dict[str, float], count: int, world: int) -> None:
    """Microseconds of a cycle, and per parameter without the collective."""
    print(f"{count} parameters, {world} ranks, CPU of the calling thread")
    for name, value in least.items():
        # One rank alone needs no collective in flat-param, and it makes none.
        alone = world == 1 and name == "flat-param"
        each = (value - (0 if alone else least["bare all-gather"])) / count
        print(f"{name:20s} {value:8.1f} us a cycle   {each:6.2f} us per parameter")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    chosen = parser.parse_args()
    with contextlib.closing(Ranks("flat_param")) as ranks:
        (least, count), *_ = ranks(chosen.world, worker, chosen.rounds, timeout_s=3600)
    report(least, count, chosen.world)
