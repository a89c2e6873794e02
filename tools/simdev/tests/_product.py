"""Train with one way of saving memory in one situation of a device, and compare with plain.

A seed determines how long kernels, copies and the host take, so it repeats a run exactly. A run is
right if no race is reported and gradients are bit-identical to plain training. A fault must reach
the program as an error, and the step after the fault must be right again.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from _ways import BLOCKS, PLAIN, SHARDED, SIM, SITUATIONS, WAYS, ZERO, Block, given, no_sense
from torch import nn

import mod_tracker

ALL = WAYS | SHARDED
STEPS = 2
Found = tuple[list[str], str]  # races, and other problems


def schedule(chosen: random.Random) -> dict[str, Any]:
    """Random costs in virtual time, in microseconds."""
    return {
        "virtual": True,
        "kernel_us": chosen.choice((0, 20, 100)),
        "copy_us": chosen.choice((0, 50, 1000, 5000)),
        "host_us": chosen.choice((0, 0, 5, 50)),
        "queue_limit": chosen.choice((0, 0, 4, 32)),
        "jitter": chosen.random() < 0.5,
    }


def part(seed: int, where: torch.device, way: str | None) -> nn.Sequential:
    """Return a few blocks on a device, plain or changed."""
    torch.manual_seed(seed)
    built = [Block() for _ in range(BLOCKS)]
    stays = way is not None and "CPU memory" in way
    blocks = [block if stays else block.to(where) for block in built]
    return nn.Sequential(*(ALL[way](block) if way else block for block in blocks))


@contextlib.contextmanager
def _around(way: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way == "report by device clock":
            stack.enter_context(mod_tracker.profile_time(clock="device"))
        yield


def trained(way: str | None, situation: str, costs: dict[str, Any], seed: int) -> list[Any]:
    """Return the input's gradient and all parameters after a few steps, on the host."""
    step, second, _ = SITUATIONS[situation]
    if way is None:
        step = PLAIN.get(situation, step)
    a, b, x = part(seed, ZERO, way), part(seed + 1, second, way), given()
    SIM.simulate(**costs)
    with _around(way):
        for _ in range(1 if situation in PLAIN else STEPS):
            step(a, b, x, seed)
    SIM.synchronize_all()
    torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.01).step()
    SIM.synchronize_all()
    with contextlib.ExitStack() as whole:
        for block in (*a, *b):
            if way in SHARDED:
                whole.enter_context(block.whole_params())
        found = [x.grad, *a.parameters(), *b.parameters()]
        return [each.detach().cpu().clone() for each in found]


def run(way: str, situation: str, seed: int) -> Found:
    """Return the races of one run, and other problems."""
    chosen = schedule(random.Random(f"{seed}/{way}/{situation}"))
    costs = chosen | SITUATIONS[situation][2]
    if way in SHARDED:
        costs |= {"virtual": True}
    SIM.reset()
    try:
        wanted = trained(None, situation, costs, seed)
        SIM.reset()
        found = trained(way, situation, costs, seed)
        gc.collect()
        return SIM.races(), "" if same(wanted, found) else "other gradients"
    except Exception as error:
        return [], f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        SIM.reset()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether values are bit-identical; shards may be cut differently."""
    return torch.equal(*(torch.cat([each.flatten() for each in one]) for one in (a, b)))


def run_on_rank(rank: int, cells: list[str], seed: int) -> list[Found]:
    """Run several cells on one of two ranks."""
    del rank
    return [run(*cell.split("/"), seed) for cell in cells]


def run_on_ranks(cells: list[str], seed: int) -> dict[str, Found]:
    """Run sharded cells on two ranks; return races of both, and the first problem."""
    from simdev.ranks import on_ranks

    told = on_ranks(run_on_rank, cells, seed)
    found = {}
    for cell, first, second in zip(cells, *told, strict=True):
        found[cell] = [*first[0], *second[0]], first[1] or second[1]
    return found


def cells_of(ways: Iterable[str]) -> list[str]:
    """The combinations that make sense, as "way/situation"."""
    return [f"{w}/{s}" for w in ways for s in SITUATIONS if not no_sense(w, s)]
