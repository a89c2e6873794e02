"""A process that imports torch once and forks the ranks of each run; see `ranks`.

- Each rank is a new process, so no run changes another one.
- A rank that raises exits, so collectives of its peers fail. A rank that returns waits until all
  ranks of the run have ended.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first use
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # imported once instead of in each rank

from torchparts_conformance._failure import sentence
from torchparts_conformance._worker import find_function, serve

AT_A_TIME = 4
GRACE_S = 3.0
_POLL_S = 0.005
_SHOWN_CHARACTERS = 4000


class _Ranks:
    """The processes of one run."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._folder = Path(run["folder"])
        self._answers: dict[int, dict[str, Any]] = {}
        self._killed = run["killed"]
        self._deadline = time.monotonic() + run["timeout_s"]
        self._pids = [_fork(run, rank) for rank in range(run["world_size"])]
        self._left = dict(enumerate(self._pids))

    def have_ended(self) -> bool:
        """Collect answers; after one rank has failed, the others get `GRACE_S` seconds."""
        for rank, pid in list(self._left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            file = self._folder / f"{rank}.json"
            if file.exists():
                self._answers[rank] = json.loads(file.read_text(encoding="utf-8"))
            elif ended:
                code = os.waitstatus_to_exitcode(status)
                error = f"the process ended with code {code}"
                self._answers[rank] = {"error": error, "code": code, "trace": self._log(rank)}
            if ended:
                del self._left[rank]
            if "error" in self._answers.get(rank, ()) and rank not in self._killed:
                self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
        if len(self._answers) < len(self._pids) and time.monotonic() < self._deadline:
            return False
        for pid in self._left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._left.clear()
        return True

    def _log(self, rank: int) -> str:
        text = (self._folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
        return text[-_SHOWN_CHARACTERS:]

    def answers(self) -> list[dict[str, Any]]:
        """Return the answer of each rank; `silent` marks those that did not answer in time."""
        silent = {"error": "did not answer in time", "silent": True}
        return [
            self._answers.get(rank, {**silent, "trace": self._log(rank)})
            for rank in range(len(self._pids))
        ]


def _fork(run: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            code = _be_rank(run, rank)
        if not code:
            signal.pause()
        os._exit(code)
    return pid


def _be_rank(run: dict[str, Any], rank: int) -> int:
    """Call the function in a new group, write its answer, and return 1 if it raised."""
    folder = Path(run["folder"])
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(run["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path[:] = run["path"]
    answer: dict[str, Any]
    try:
        dist.init_process_group(
            "gloo",
            init_method=(folder / "store").as_uri(),
            rank=rank,
            world_size=run["world_size"],
            timeout=datetime.timedelta(seconds=run["timeout_s"]),
        )
        torch.manual_seed(0)
        function = find_function(*run["function"])
        answer = {"value": function(rank, run["world_size"], *run["args"])}
        text = json.dumps(answer)
    except BaseException as error:  # any exception of a rank belongs to the run
        failed = isinstance(error, AssertionError)
        trace = traceback.format_exc()[-_SHOWN_CHARACTERS:]
        answer = {"error": sentence(error), "trace": trace, "failed": failed}
        text = json.dumps(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    written = folder / f"{rank}.writing"
    written.write_text(text, encoding="utf-8")
    written.rename(folder / f"{rank}.json")
    return int("error" in answer)


def _answer(
    job: dict[str, Any], tell: Callable[[dict[str, Any]], None]
) -> dict[str, list[list[dict[str, Any]]]]:
    """Do some runs, a few at a time."""
    runs, begun = job["runs"], list[_Ranks]()
    going: list[_Ranks] = []
    while len(begun) < len(runs) or going:
        while len(begun) < len(runs) and len(going) < AT_A_TIME:
            begun.append(_Ranks(runs[len(begun)]))
            going.append(begun[-1])
        time.sleep(_POLL_S)
        going = [each for each in going if not each.have_ended()]
    return {"answers": [each.answers() for each in begun]}


def main() -> None:
    """Import the modules named on the command line, and serve until standard input ends."""
    torch.set_num_threads(1)
    for module in sys.argv[1:]:
        with contextlib.suppress(Exception):  # ranks that need it report the error
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in ranks would otherwise copy the pages of all imported objects
    serve(_answer)


if __name__ == "__main__":
    main()
