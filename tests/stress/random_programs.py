"""The random programs of `programs.py` as trials: a number is a program's seed."""

from __future__ import annotations

import torch

from stress import programs
from stress.trials import Job, Scenario, Trial

COUNT = 2000
BAD = ("bare", "wrong")


def _prepare(job: Job) -> tuple[int, Trial]:
    torch.set_num_threads(1)
    ends: dict[str, int] = {}

    def trial(number: int) -> str:
        end, said = programs.verdict(number)
        ends[end] = ends.get(end, 0) + 1
        job.notes.update({name: str(count) for name, count in sorted(ends.items())})
        return f"{end}: {said}" if end in BAD else ""

    return job.count or COUNT, trial


def scenarios() -> list[Scenario]:
    return [Scenario("programs", "regions", _prepare)]
