"""Compare the speed of two checkouts: their processes take turns, row by row.

    python .ci/compare_speed.py BEFORE AFTER --rounds 9

A row is one thing that a user of a package does over and over, on a model so small that it is the
package that takes the time. Each process gives the shortest of many repetitions. Printed are the
shortest of all processes, and median and quartiles of the ratios of neighbouring processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ENOUGH_S = 0.01
SAMPLES = 25
Row = Callable[[], object]


def shortest_us(row: Row) -> float:
    """Microseconds of one run, the shortest of several."""
    row()
    count, took = 1, 0.0
    while took < ENOUGH_S:
        start = time.perf_counter()
        for _ in range(count):
            row()
        took = time.perf_counter() - start
        count = max(count + 1, int(count * 1.2 * ENOUGH_S / max(took, 1e-9)))
    found = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(count):
            row()
        found.append((time.perf_counter() - start) / count)
    return min(found) * 1e6


def rows_of_ckpt_wrap() -> Iterator[tuple[str, Row]]:
    """Calls of wrapped modules."""
    import torch
    from torch import nn

    import ckpt_wrap

    x = torch.randn(4, 8, requires_grad=True)

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    plain, wrapped, placed = layers(), ckpt_wrap.checkpoint_wrapper(layers()), layers()
    ckpt_wrap.checkpoint_(placed)
    offloaded = ckpt_wrap.offload_wrapper(layers())
    yield "plain module, step (no package)", lambda: plain(x).sum().backward()
    yield "checkpoint_wrapper, forward", lambda: wrapped(x)
    yield "checkpoint_wrapper, step", lambda: wrapped(x).sum().backward()
    yield "checkpoint_, step", lambda: placed(x).sum().backward()
    yield "offload_wrapper, step", lambda: offloaded(x).sum().backward()
    yield "state_dict", wrapped.state_dict
    yield "wrap and unwrap", lambda: ckpt_wrap.unwrap(ckpt_wrap.checkpoint_(plain))


def rows_of_mod_tracker() -> Iterator[tuple[str, Row]]:
    """Steps of 100 layers under a tracker or a report."""
    import torch
    from torch import nn

    import mod_tracker

    model = nn.Sequential(*(nn.Identity() for _ in range(98)), nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    def under(make: Callable[[], object]) -> Row:
        def run() -> None:
            with make():  # type: ignore[attr-defined]
                step()

        return run

    yield "plain model, step (no package)", step
    with mod_tracker.ModTracker():
        yield "tracker, forward", lambda: model(x)
        yield "tracker, step", step
    yield "new tracker, step", under(mod_tracker.ModTracker)
    for make in (mod_tracker.profile_time, mod_tracker.profile_flops, mod_tracker.profile_memory):
        with make():
            for _ in range(8):
                step()
            yield f"{make.__name__}, step", step


def rows_of_flat_param() -> Iterator[tuple[str, Row]]:
    """Flattened models, in one process and as a unit of a world of one."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import flat_param

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))

    x = torch.randn(4, 8)
    model = layers()
    flat = flat_param.flatten(model)
    optimizer = torch.optim.AdamW(flat.chunks(1 << 18), fused=True)

    def step() -> None:
        model(x).sum().backward()

    step()
    yield "flatten", lambda: flat_param.flatten(layers())
    yield "flattened, step", step
    yield "flattened, optimizer's step", optimizer.step
    yield "flattened, zero_grad", flat.zero_grad
    yield "flattened, state_dict", model.state_dict
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = layers()
    for layer in sharded:
        flat_param.fully_shard(layer)
    flat_param.fully_shard(sharded)
    yield "fully_shard, 20 units, forward", lambda: sharded(x)
    yield "fully_shard, 20 units, step", lambda: sharded(x).sum().backward()
    dist.destroy_process_group()


def rows_of_sac_policies() -> Iterator[tuple[str, Row]]:
    """Regions under each engine, and a plan."""
    import torch
    from torch import nn

    import sac_policies as sp

    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(4, 8, requires_grad=True)
    policy = sp.save_ops(sp.MATMULS)
    text = sp.to_json(policy)
    yield "plain block, step (no package)", lambda: block(x).sum().backward()
    for engine in ("contexts", "recipe"):

        def forward(engine: str = engine) -> torch.Tensor:
            return sp.checkpoint(block, x, policy=policy, engine=engine)

        yield f"{engine}, forward", forward
        yield f"{engine}, step", lambda forward=forward: forward().sum().backward()
    trace = sp.profile(block, x)
    yield "solve", lambda: sp.solve(trace, 2000)
    yield "from_json", lambda: sp.from_json(text)


ROWS = {
    "ckpt_wrap": rows_of_ckpt_wrap,
    "mod_tracker": rows_of_mod_tracker,
    "flat_param": rows_of_flat_param,
    "sac_policies": rows_of_sac_policies,
    "torchparts_conformance": lambda: iter(()),
}


def measure(package: str) -> dict[str, float]:
    """Microseconds of each row of a package, and of its import, in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.perf_counter()
    __import__(package)
    found = {f"{package}: import": (time.perf_counter() - start) * 1e6}
    for name, row in ROWS[package]():
        found[f"{package}: {name}"] = shortest_us(row)
    return found


def measured(checkout: Path, package: str) -> dict[str, float]:
    """The same, in a process of its own with the sources of a checkout."""
    sources = [*sorted(checkout.glob("packages/*/src")), checkout / "conformance/src"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "",  # or every import compiles
    }
    command = [sys.executable, __file__, "--measure", package]
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, or have it measured in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path, nargs="*", help="two: before and after")
    parser.add_argument("--rounds", type=int, default=9, help="processes of each, for a package")
    parser.add_argument("--package", action="append", choices=ROWS, help="default: every one")
    parser.add_argument("--measure", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    if len(args.checkouts) != 2 or args.rounds < 2:
        parser.error("two checkouts, and at least two rounds, are needed")
    print("| row | before, us | after, us | ratio | quartiles |\n|---|---|---|---|---|")
    for package in args.package or ROWS:
        for checkout in args.checkouts:
            measured(checkout, package)  # writes what Python keeps of sources
        rounds: list[list[dict[str, float]]] = []
        for at in range(args.rounds):
            pair = [measured(path, package) for path in args.checkouts[:: -1 if at % 2 else 1]]
            rounds.append(pair[:: -1 if at % 2 else 1])
        for row in rounds[0][0].keys() & rounds[0][1].keys():
            ratios = [after[row] / before[row] for before, after in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            before, after = (min(pair[at][row] for pair in rounds) for at in (0, 1))
            print(f"| {row} | {before:.1f} | {after:.1f} | {middle:.3f} | {low:.3f}-{high:.3f} |")


if __name__ == "__main__":
    main()
