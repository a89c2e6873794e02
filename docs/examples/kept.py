"""What a step keeps for its backward, and how long it takes; the other examples use this."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Every storage that an operator made; `bytes()` counts those that are still there."""

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
        """Bytes of what is alive now."""
        gc.collect()
        return sum(size for reference, size in self.made.values() if not reference.expired())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def kept_bytes(forward: Callable[..., Any], *args: Any, **inputs: Any) -> int:
    """Bytes that a forward made and that are alive when it has ended; then runs the backward.

    `forward` gives a loss, or what has one.
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
    """How a step of one model went, beside that of the first.

    kept_bytes: between forward and backward.
    time: of a step as a multiple of the first model's in the same turn, median of all turns.
    differing: gradients and buffers that are not the first model's, bit by bit.
    """

    kept_bytes: int
    time: float
    differing: tuple[str, ...] = ()


def differing(model: nn.Module, plain: nn.Module) -> tuple[str, ...]:
    """Names, as the plain model has them, of gradients and buffers with other bits."""
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
    """Take steps of all models in turn, with the same random numbers, and compare with the first.

    Args:
        models: by the name that is printed; all have the same weights.
        forward: given a model, a loss, or what has one.
        turns: how often each takes a step, after one that is not timed.
        compare: gradients and buffers, too; shards of two libraries cannot be.
        say: print a line for each.
    """
    ratios: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(turns + 1):
        seconds = {name: _step_s(model, forward, turn) for name, model in models.items()}
        first = next(iter(seconds.values()))
        for name, took in seconds.items() if turn else ():
            ratios[name].append(took / first)
    plain, found = next(iter(models.values())), {}
    for name, model in models.items():
        model.zero_grad()
        torch.manual_seed(turns)
        kept = kept_bytes(forward, model)
        wrong = differing(model, plain) if compare else ()
        found[name] = Way(kept, statistics.median(ratios[name]), wrong)
        if say:
            times = f"{found[name].time:.2f} ({min(ratios[name]):.2f} to {max(ratios[name]):.2f})"
            bits = f", gradients {f'{len(wrong)} differ' if wrong else 'equal'}" if compare else ""
            print(f"{name:26}{kept / 1024:9.0f} KiB kept, time {times}{bits}")
    return found


def _step_s(model: nn.Module, forward: Callable[[Any], Any], seed: int) -> float:
    """Seconds that forward and backward take."""
    model.zero_grad()
    torch.manual_seed(seed)
    start = time.perf_counter()
    out = forward(model)
    getattr(out, "loss", out).backward()
    return time.perf_counter() - start
