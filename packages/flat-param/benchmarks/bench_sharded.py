"""How long is one training step of a 5.3M-parameter model on two gloo ranks, beside torch's own?

Every configuration trains the same model on the same data, in rounds that take turns, so that
a slow moment of the machine meets all of them. Printed: the median step time by the clock and by
the CPU of rank 0 (all its threads; what a busy machine leaves comparable), the ratio to each of
torch's two, the collectives of one step, and the limit: local compute plus the raw collectives.

    python packages/flat-param/benchmarks/bench_sharded.py [--rounds 7] [--steps 3]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flat_param
from torchparts_conformance.ranks import Ranks

WORLD = 2
Step = Callable[[], None]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        heads = (
            part(normed).unflatten(-1, (-1, 64)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Six blocks of width 256 between an embedding and a head: 5.3M parameters."""

    def __init__(self, width: int = 256, depth: int = 6, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ours(*, reshard: bool) -> nn.Module:
    """One unit per block, and one around them."""
    model = Model()
    for block in model.blocks:
        flat_param.fully_shard(block, reshard_after_forward=reshard)
    return flat_param.fully_shard(model, reshard_after_forward=reshard)


def fsdp1(strategy: ShardingStrategy, *, use_orig_params: bool) -> nn.Module:
    """The same units in FullyShardedDataParallel."""
    return FullyShardedDataParallel(
        Model(),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )


def fsdp2(*, reshard: bool) -> nn.Module:
    """The same units in torch's fully_shard."""
    model, mesh = Model(), init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return torch_fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "local, no communication": Model,
    "flat-param reshard": lambda: ours(reshard=True),
    "flat-param no reshard": lambda: ours(reshard=False),
    "FSDP1 FULL_SHARD flat": lambda: fsdp1(ShardingStrategy.FULL_SHARD, use_orig_params=False),
    "FSDP1 FULL_SHARD orig": lambda: fsdp1(ShardingStrategy.FULL_SHARD, use_orig_params=True),
    "FSDP1 SHARD_GRAD_OP orig": lambda: fsdp1(ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
    "FSDP2 reshard": lambda: fsdp2(reshard=True),
    "FSDP2 no reshard": lambda: fsdp2(reshard=False),
}


def make_step(build: Callable[[], nn.Module], rank: int) -> tuple[nn.Module, Step]:
    """A model and one training step of it."""
    torch.manual_seed(0)
    model = build()
    ids = torch.randint(0, 1024, (2, 64), generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(ids).logsumexp(-1).mean().backward()
        optimizer.step()

    return model, step


def raw_collectives(gathers: int) -> Step:
    """The bytes of one step in single calls: so many gathers, and the cheapest known sum."""
    numel = sum(param.numel() for param in Model().parameters()) // WORLD * WORLD
    full, shard = torch.zeros(numel), torch.zeros(numel // WORLD)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    other = torch.empty_like(full)

    def step() -> None:
        for _ in range(gathers):
            gather(full, shard)
        dist.all_to_all_single(other, full)
        torch.sum(other.view(WORLD, -1), 0, out=shard)

    return step


def timed(step: Step, steps: int) -> tuple[float, float]:
    """Milliseconds of one step by the clock and by this process's CPU, ranks starting together."""
    dist.barrier()
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    cpu = time.process_time() - cpu
    dist.barrier()
    return (time.perf_counter() - clock) / steps * 1e3, cpu / steps * 1e3


def worker(rank: int, world: int, rounds: int, steps: int) -> tuple[object, list[str]]:
    """One rank: build everything, then measure in turns; return milliseconds and comm counts."""
    warnings.simplefilter("ignore")
    built = {name: make_step(build, rank) for name, build in MODELS.items()}
    todo = {name: step for name, (_, step) in built.items()}
    todo["raw collectives reshard"] = raw_collectives(2)
    todo["raw collectives no reshard"] = raw_collectives(1)
    for step in todo.values():
        timed(step, 2)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in todo}
    for _ in range(rounds):
        for name, step in todo.items():
            times[name].append(timed(step, steps))
    counts = []
    for name, (model, step) in built.items():
        if isinstance(model, flat_param.ShardedModule):
            model.comm_counts()
            step()
            counts.append(f"{name}: {model.comm_counts()}")
    return times, counts


def report(times: dict[str, float], kind: str) -> None:
    """Print medians and ratios."""
    print(f"By the {kind}:")
    peers = {name: value for name, value in times.items() if name.startswith("FSDP")}
    for name, value in times.items():
        print(f"{name:32s} {value:8.1f} ms")
    for way in ("reshard", "no reshard"):
        mine = times[f"flat-param {way}"]
        limit = times["local, no communication"] + times[f"raw collectives {way}"]
        ratios = ", ".join(f"{name} {mine / value:.2f}" for name, value in peers.items())
        print(f"{way}: {mine / limit:.2f} of local + raw; of {ratios}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    chosen = parser.parse_args()
    with contextlib.closing(Ranks("flat_param")) as ranks:
        times, counts = ranks(WORLD, worker, chosen.rounds, chosen.steps, timeout_s=3600)[0]
    for index, kind in enumerate(("clock", "CPU")):
        report({name: statistics.median(v[index] for v in t) for name, t in times.items()}, kind)
    print("\n".join(counts))
