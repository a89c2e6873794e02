"""Processes forked and spawned around a model that offloads saved tensors to a folder.

Parent and children train with the same folder; all their gradients must be plain's, and no file may
be left. What is drawn is when in a step the fork comes, and who is first.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ckpt_wrap
from stress.models import Stack, differ, gradients, inputs, stack
from stress.trials import Job, Scenario, Trial

PATIENCE_S = 120


def _offloaded(folder: Path) -> Stack:
    model = stack()
    for block in model.blocks:
        ckpt_wrap.checkpoint_(ckpt_wrap.offload_(block, to=str(folder), min_bytes=1))
    return model


def _trains(model: nn.Module, seed: int, steps: int = 4) -> str:
    """Return what is wrong with the gradients of some steps."""
    plain = stack()
    for at in range(seed, seed + steps):
        x, same = inputs(at), inputs(at)
        if why := differ(gradients(model, x, at), gradients(plain, same, at)):
            return why
    return ""


def _child(folder: str, seed: int, delay_s: float) -> None:
    """Train in another process; exit with 3 if a gradient is wrong."""
    torch.set_num_threads(1)
    time.sleep(delay_s)
    raise SystemExit(3 if _trains(_offloaded(Path(folder)), seed) else 0)


class _Trained(Dataset[torch.Tensor]):
    """Items computed with a model of the worker; 1.0 if gradients are plain's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return torch.tensor(0.0 if _trains(_offloaded(self.folder), at, 2) else 1.0)


def _processes(how: str, folder: Path, number: int, job: Job) -> str:
    rng = job.random(number)
    context: Any = multiprocessing.get_context(how)
    delays = [rng.uniform(0, 0.2) for _ in range(2)]
    started = [
        context.Process(target=_child, args=(str(folder), number + at, delay))
        for at, delay in enumerate(delays)
    ]
    model = _offloaded(folder)
    if rng.random() < 0.5:
        gradients(model, inputs())
    for process in started:
        process.start()
    why = _trains(model, number)
    for process in started:
        process.join(PATIENCE_S)
    codes = [process.exitcode for process in started]
    return why or (f"children ended with {codes}" if codes != [0, 0] else "")


def _workers(how: str, folder: Path, number: int, job: Job) -> str:
    model = _offloaded(folder)
    loader = DataLoader(_Trained(folder), num_workers=2, multiprocessing_context=how)
    whys, items = [], []
    for item in loader:
        whys.append(_trains(model, number, 1))
        items += item.tolist()
    why = next(filter(None, whys), "")
    return why or ("" if items == [1.0] * 6 else f"workers' steps were right or not: {items}")


def _in_a_step(folder: Path, number: int, job: Job) -> str:
    """Fork between forward and backward; parent and child continue, in either order."""
    rng, model = job.random(number), _offloaded(folder)
    plain, expected = stack(), list[torch.Tensor | None]()
    expected = gradients(plain, inputs())
    x = inputs()
    torch.manual_seed(2)
    loss = model(x).square().sum()

    def rest() -> str:
        loss.backward()
        return differ([each.grad for each in (*model.parameters(), x)], expected)

    child_first, read_write = rng.random() < 0.5, os.pipe()
    pid = os.fork()
    if not pid:
        code = 3
        try:
            if not child_first:
                os.read(read_write[0], 1)
            code = 0 if not rest() and not _trains(model, number) else 3
        except ckpt_wrap.OffloadError:
            # The parent has finished and its files are gone; the child starts again.
            code = 0 if not child_first and not _trains(model, number) else 4
        finally:
            atexit._run_exitfuncs()  # as a process that exits normally does
            os._exit(code)
    if child_first:
        _, status = os.waitpid(pid, 0)
        why = rest()
    else:
        why = rest()
        os.write(read_write[1], b"x")
        _, status = os.waitpid(pid, 0)
    for end in read_write:
        os.close(end)
    code = os.waitstatus_to_exitcode(status)
    why = why or _trains(model, number)
    return why or (f"the child ended with {code}" if code else "")


Forked = Callable[[Path, int, Job], str]


def _scenario(name: str, forked: Forked, count: int) -> Scenario:
    def prepare(job: Job) -> tuple[int, Trial]:
        folder = job.folder / "away"
        folder.mkdir()

        def trial(number: int) -> str:
            why = forked(folder, number, job)
            left = sorted(each.name for each in folder.iterdir())
            return why or (f"the folder holds {left}" if left else "")

        return job.count or count, trial

    return Scenario("forks", name, prepare)


def scenarios() -> list[Scenario]:
    found = [_scenario("in-a-step", _in_a_step, 100)]
    for how, count in (("fork", 50), ("spawn", 5)):

        def processes(folder: Path, number: int, job: Job, how: str = how) -> str:
            return _processes(how, folder, number, job)

        def workers(folder: Path, number: int, job: Job, how: str = how) -> str:
            return _workers(how, folder, number, job)

        found += [
            _scenario(f"processes-{how}", processes, count),
            _scenario(f"workers-{how}", workers, count),
        ]
    return found
