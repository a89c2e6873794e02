"""3,000 steps with all four parts at once: bits, memory, handles and threads.

Parameters are flat, or sharded on one rank. Some blocks recompute by a policy, some offload to a
folder. A report runs every 100 steps, and the model is saved every 500. Every 100 steps gradients
are compared with those of a plain model. A trial is one step.

The scenario `plain` is the control: the same steps of the plain model, with torch's own optimizer
and saves. Its growth is torch's and the system's.

- Memory is compared after everything has run twice: each kind of report imports and caches
  permanently at its first use.
- Garbage is collected before memory is read. A full automatic collection comes when a quarter of
  all objects are new, and so may not come in 3,000 steps at all.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ckpt_wrap
import flat_param
import mod_tracker
import sac_policies
from stress.models import Transformer, differ
from stress.ranks import join
from stress.trials import Job, Scenario, Trial

STEPS = 3000
WARM_STEPS = 1000
MOST_GROWTH = 0.005
REPORTS = (
    mod_tracker.profile_flops,
    mod_tracker.profile_memory,
    mod_tracker.profile_time,
    mod_tracker.trace,
)


def _ids(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 256, (4, 16), generator=generator)


def _loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)
    ids = _ids(step)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def _with_parts(folder: Path) -> Transformer:
    """Return the model with a policy on its first layers and a folder for the others."""
    torch.manual_seed(0)
    model = Transformer()
    policy = sac_policies.save_ops(sac_policies.MATMULS, sac_policies.ATTENTION)
    first, second, third, fourth = model.layers
    engine = functools.partial(sac_policies.checkpoint, policy=policy)
    ckpt_wrap.checkpoint_(first, checkpoint_fn=engine)
    ckpt_wrap.checkpoint_(second, context_fn=sac_policies.context_fn(policy))
    ckpt_wrap.offload_(third, to=str(folder), min_bytes=1)
    ckpt_wrap.checkpoint_(ckpt_wrap.offload_(fourth, to=str(folder), min_bytes=1))
    return model


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Watch:
    """Compares the process with its state after the warm-up."""

    def __init__(self, job: Job) -> None:
        self.job, self.bytes, self.counts = job, 0, (0, 0)

    def look(self, step: int) -> str:
        """Return what has grown, or nothing."""
        gc.collect()  # otherwise garbage counts as growth
        counts = len(os.listdir("/proc/self/fd")), threading.active_count()
        if step <= WARM_STEPS:
            self.bytes, self.counts = resident_bytes(), counts
            return ""
        growth = resident_bytes() / self.bytes - 1
        self.job.notes.update(
            {"memory": f"{100 * growth:+.2f} %", "handles": str(counts[0])}
            | {"threads": str(counts[1])}
        )
        if counts != self.counts:
            return f"handles and threads were {self.counts}, and are {counts} at step {step}"
        if growth > MOST_GROWTH and step >= self.job.count:
            return f"resident memory has grown by {100 * growth:.2f} %"
        return ""


def _soak(job: Job, kind: str) -> tuple[int, Trial]:
    torch.set_num_threads(1)
    job.count = job.count or STEPS
    away = job.folder / "away"
    away.mkdir()
    model = Transformer() if kind == "plain" else _with_parts(away)
    plain, watch = Transformer(), _Watch(job)
    step_optimizer, save = _KINDS[kind](model, job.folder)

    def compare(step: int) -> str:
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        _loss(plain, step).backward()
        found = [each.grad for each in model.parameters()]
        return differ(found, [each.grad for each in plain.parameters()])

    def trial(number: int) -> str:
        step, why = number + 1, ""
        if step % 100 == 0 and kind != "plain":
            with REPORTS[step // 100 % len(REPORTS)]() as report:
                _loss(model, step).backward()
            report.table()
        else:
            _loss(model, step).backward()
        if step % 500 == 0:
            save()
        if step % 100 == 0:
            why = compare(step)
        step_optimizer()
        if not why and (step % 500 == 0 or step == job.count):
            why = watch.look(step)
        return why

    return job.count, trial


def _plain(model: nn.Module, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return step and save functions for torch's own parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, functools.partial(_save_whole, model, folder / "model.pt")


def _save_whole(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))


def _flat(model: nn.Module, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return step and save functions for flat parameters."""
    flat = flat_param.flatten(model)
    optimizer = torch.optim.AdamW(flat.chunks(), lr=1e-3, fused=True)

    def step() -> None:
        flat.clip_(1.0)
        optimizer.step()
        flat.zero_grad()

    return step, functools.partial(_save_whole, model, folder / "model.pt")


def _sharded(model: nn.Module, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return step and save functions for parameters sharded on one rank."""
    join(folder, 0, 1)
    for layer in model.layers:  # type: ignore[union-attr]  # a list of modules
        flat_param.fully_shard(layer)
    flat_param.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model.clip_grad_norm_(1.0)  # type: ignore[operator]  # what fully_shard adds
        optimizer.step()
        optimizer.zero_grad()

    def save() -> None:
        path = folder / "checkpoint"
        flat_param.save_sharded(model, path, optimizer=optimizer)
        flat_param.load_sharded(model, path, optimizer=optimizer)

    return step, save


_KINDS = {"plain": _plain, "flat": _flat, "sharded": _sharded}


def scenarios() -> list[Scenario]:
    """Return the control, flat, and sharded scenarios."""
    return [
        Scenario("soak", kind, functools.partial(_soak, kind=kind), in_order=True)
        for kind in _KINDS
    ]
