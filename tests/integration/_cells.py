"""Run a model with a part in a separate process, so that crashes and hangs become results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from multiprocessing.connection import Connection
from typing import Any

import _parts
import torch
from _models import Case

LIMIT_S = 300
JUDGES = {
    "step": _parts.step,
    "names": _parts.names,
    "reports": _parts.reports,
    "trained": _parts.trained,
}


def outcome_of(part: _parts.Part, case: Case) -> dict[str, Any]:
    try:
        judge = JUDGES[part.judge]
        return {"outcome": "equal", **judge(part, _parts.enlarged(case), *_parts.twins(case))}
    except _parts.DiffersError as error:
        return error.told()
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return {"outcome": "raises", "error": f"{type(error).__name__}: {first}"}


def cell(part: _parts.Part, case: Case, answer: Connection) -> None:
    """The entry point of the process."""
    os.setsid()
    warnings.simplefilter("ignore")
    answer.send(outcome_of(part, case))


def in_process(part: _parts.Part, case: Case, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run a cell in a process and return its result, also after a crash or a timeout."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=cell, args=(part, case, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(limit_s) else {"outcome": "takes too long"}
    except EOFError:
        process.join()
        found = {"outcome": "crashes", "error": f"the process ended with {process.exitcode}"}
    if found["outcome"] == "takes too long":
        found["error"] = f"more than {limit_s:g} s"
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return {"model": case.name, "part": part.name, **found}


DONE: dict[tuple[str, str], dict[str, Any]] = {}
"""Results by part and model."""


def cell_of(part: _parts.Part, case: Case) -> dict[str, Any]:
    """Return the result of a cell, which runs once for all tests."""
    if (part.name, case.name) not in DONE:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        case.build()  # imported here, so that each process finds the library
        DONE[part.name, case.name] = in_process(part, case)
    return DONE[part.name, case.name]


def kept_bytes_of(part: str, case: Case) -> int:
    """Return the bytes that a model with a part keeps between forward and backward."""
    found = cell_of(_parts.BY_NAME[part], case)
    assert "kept_bytes" in found, found
    return int(found["kept_bytes"])
