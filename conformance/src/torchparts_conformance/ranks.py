"""Run functions in several processes that form a gloo group on this machine.

A server process imports torch once and forks the ranks of each run. Ranks use one thread and
127.0.0.1, and find the environment variables that torchrun sets. Only processes that were started
here are ended.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import RankError
from torchparts_conformance._worker import Worker, place_of

__all__ = ["RankError", "Ranks", "Run"]

START_S = 120.0
_SERVER = "torchparts_conformance._rank_server"


@dataclass(frozen=True)
class Run:
    """One call of a function on every rank of a new group.

    Attributes:
        function: called as `function(rank, world_size, *args)`: a function of a module, or
            `"FILE.py::NAME"`. Its result can be written as JSON.
        world_size: number of ranks.
        args: further arguments that can be written as JSON.
        timeout_s: limit of the run and of each collective, in seconds.
        killed: ranks that must end by SIGKILL; their result is None.
    """

    function: Callable[..., Any] | str
    world_size: int
    args: tuple[Any, ...] = ()
    timeout_s: float = 60.0
    killed: tuple[int, ...] = ()

    def job(self, folder: Path) -> dict[str, Any]:
        """Return the message for the server; the folder is shared by the ranks."""
        if isinstance(self.function, str):
            file, _, name = self.function.rpartition("::")
            function = "", str(Path(file).resolve()), name
        else:
            function = place_of(self.function)
        return {
            "function": function,
            "args": self.args,
            "world_size": self.world_size,
            "timeout_s": self.timeout_s,
            "killed": self.killed,
            "folder": str(folder),
            "path": sys.path,
            "environment": _torchrun_variables(self.world_size),
        }

    def results(self, answers: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the results by rank.

        Raises:
            AssertionError: a rank raised one; the message starts with the number of the rank.
            RankError: a rank raised another exception, died or did not answer in time.
        """
        failures = [
            (rank, answer)
            for rank, answer in enumerate(answers)
            if ("error" in answer) != (rank in self.killed) or answer.get("code", -9) != -9
        ]
        if failures:
            # The error that probably caused the others comes first.
            rank, answer = min(
                failures,
                key=lambda f: (not (f[1].get("failed") or "code" in f[1]), "silent" in f[1]),
            )
            said = answer.get("error", "did not end by SIGKILL")
            message = f"rank {rank}: {said}\n{answer.get('trace', '')}".rstrip()
            raise AssertionError(message) if answer.get("failed") else RankError(message)
        return [answer.get("value") for answer in answers]


class Ranks:
    """Starts ranks; call it with a world size, a function and its arguments."""

    def __init__(self, *modules: str, options: Sequence[str] = ()) -> None:
        """Start nothing yet.

        Args:
            modules: imported by the server, so that no rank spends time on them.
            options: of the interpreter, such as `-W error`.
        """
        self._modules, self._options = modules, options
        self._folder = tempfile.TemporaryDirectory(prefix="torchparts-ranks-")
        self._server: Worker | None = None

    def start(self) -> None:
        """Start the server without waiting for it."""
        if self._server is None:
            log = Path(self._folder.name) / "server.log"
            self._server = Worker(
                _SERVER, *self._modules, log=log, options=self._options, leads=True
            )

    def __call__(
        self, world_size: int, function: Callable[..., Any] | str, *args: Any, **options: Any
    ) -> list[Any]:
        """Return the results of `function(rank, world_size, *args)` by rank; see `Run`."""
        (results,) = self.results_of([Run(function, world_size, args, **options)])
        return results

    def results_of(self, runs: Sequence[Run]) -> list[list[Any]]:
        """Do several runs, a few at a time, and return the results of each by rank."""
        jobs = []
        for run in runs:
            folder = Path(tempfile.mkdtemp(dir=self._folder.name))
            jobs.append(run.job(folder))
            json.dumps(jobs[-1])
        self.start()
        server = self._server
        assert server is not None
        try:
            if not server.is_ready and not server.becomes_ready(START_S):
                raise RankError(f"ranks did not start in {START_S:g} s: {server.printed()}")
            server.send({"runs": jobs})
            answer = server.answers.get()
            if answer is None:
                raise RankError(f"the server of ranks ended: {server.printed()}")
        except BaseException:  # also when a time limit interrupts the caller: ranks still run
            self.stop()
            raise
        done = zip(runs, answer["answers"], strict=True)
        return [run.results(answers) for run, answers in done]

    def stop(self) -> None:
        """End the server and all ranks; the next run starts a new server."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def close(self) -> None:
        """End all processes and remove the files."""
        self.stop()
        self._folder.cleanup()


def _torchrun_variables(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "ranks",
    }
