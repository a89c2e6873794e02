"""Measure the bytes that a step keeps for backward, and its time; used by the other examples."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Tracks every storage that an operator allocates; `bytes()` counts the live ones."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in _tensors(out)):
            if storage._cdata not in given:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self) -> int:
        """Return the bytes of live storages."""
        gc.collect()
        return sum(size for reference, size in self.made.values() if not reference.expired())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def kept_bytes(forward: Callable[..., Any], *args: Any, **inputs: Any) -> int:
    """Return the bytes that a forward allocated and kept; then run backward.

    `forward` returns a loss, or an object with a `loss`.
    """
    with Alive() as alive:
        out = forward(*args, **inputs)
        loss = getattr(out, "loss", out)
        del out
    kept = alive.bytes()
    loss.backward()
    return kept


@dataclass(frozen=True)
class Way:
    """Results of one model's step, compared with the first model's.

    kept_bytes: between forward and backward.
    time: of a step as a multiple of the first model's in the same turn, median of all turns.
    differing: gradients and buffers that are not bit-identical to the first model's.
    """

    kept_bytes: int
    time: float
    differing: tuple[str, ...] = ()


def differing(model: nn.Module, plain: nn.Module) -> tuple[str, ...]:
    """Return plain names of gradients and buffers that are not bit-identical."""
    pairs = [
        *(
            (n, p.grad, q.grad)
            for (n, p), q in zip(*_both(plain, model, "parameters"), strict=True)
        ),
        *((n, b, c) for (n, b), c in zip(*_both(plain, model, "buffers"), strict=True)),
    ]
    return tuple(name for name, right, found in pairs if not _same(right, found))


def _both(plain: nn.Module, model: nn.Module, kind: str) -> tuple[Any, Any]:
    return getattr(plain, f"named_{kind}")(), getattr(model, kind)()


def _same(right: Tensor | None, found: Tensor | None) -> bool:
    if right is None or found is None:
        return right is found
    return torch.equal(right, found)


def side_by_side(
    models: Mapping[str, nn.Module],
    forward: Callable[[Any], Any],
    *,
    turns: int = 5,
    compare: bool = True,
    say: bool = True,
) -> dict[str, Way]:
    """Run steps of all models in turns with the same random numbers; compare with the first.

    Args:
        models: by the name that is printed; all have the same weights.
        forward: called with a model; returns a loss, or an object with a `loss`.
        turns: timed steps of each model, after one step that is not timed.
        compare: whether to compare gradients and buffers; not possible for shards of two libraries.
        say: whether to print a line for each model.
    """
    ratios = in_turn({name: _step_of(model, forward) for name, model in models.items()}, turns)
    plain, found = next(iter(models.values())), {}
    for name, model in models.items():
        model.zero_grad()
        torch.manual_seed(turns)
        kept = kept_bytes(forward, model)
        wrong = differing(model, plain) if compare else ()
        found[name] = Way(kept, statistics.median(ratios[name]), wrong)
        if say:
            bits = f", gradients {f'{len(wrong)} differ' if wrong else 'equal'}" if compare else ""
            print(f"{name:26}{kept / 1024:9.0f} KiB kept, {ratio(ratios[name])}{bits}")
    return found


def in_turn(steps: Mapping[str, Callable[[int], Any]], turns: int = 5) -> dict[str, list[float]]:
    """Return the times of each step relative to the first step of the same turn.

    Args:
        steps: by name; each is called with the number of the turn, from 0.
        turns: calls of each step, after one turn that is not timed.
    """
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        seconds = {name: _seconds(step, turn) for name, step in steps.items()}
        first = next(iter(seconds.values()))
        for name, took in seconds.items() if turn else ():
            ratios[name].append(took / first)
    return ratios


def ratio(ratios: list[float]) -> str:
    """Format median, least and most of some ratios."""
    return f"time {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def say_files(times: Mapping[str, list[float]], folder: str, job: str) -> None:
    """Print for each library the size of its files in `folder/NAME/0`, and the job's duration."""
    for name, ratios in times.items():
        files = [path for path in Path(folder, name, "0").rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{job}, {name:15}{size / 1024:9.0f} KiB in {len(files)} files, {ratio(ratios)}")


def same(one: Any, other: Any) -> bool:
    """Whether two trees of dicts and lists have the same keys and bit-identical tensors."""
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def on_ranks(worker: Callable[[str, str], None], *jobs: tuple[int, str]) -> bool:
    """Start this script by torchrun for each (ranks, job); a rank calls `worker(folder, job)`.

    Returns True in the starting process after all jobs. The folder is empty at the start.
    """
    if "RANK" in os.environ:
        worker(*sys.argv[1:])
        return False
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        for ranks, job in jobs:
            command = [*torchrun, f"--nproc-per-node={ranks}", sys.argv[0], folder, job]
            subprocess.run(command, check=True)
    return True


def _step_of(model: nn.Module, forward: Callable[[Any], Any]) -> Callable[[int], None]:
    """Run forward and backward with the random numbers of the turn."""

    def step(turn: int) -> None:
        torch.manual_seed(turn)
        out = forward(model)
        getattr(out, "loss", out).backward()
        model.zero_grad()

    return step


def _seconds(step: Callable[[int], Any], turn: int) -> float:
    start = time.perf_counter()
    step(turn)
    return time.perf_counter() - start
