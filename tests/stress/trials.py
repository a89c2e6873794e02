"""Trials in separate processes: a trial that kills, hangs or corrupts its process affects no other.

Note [Trials]
    A scenario is prepared once in a forked process, or in one for each rank, and then runs many
    trials by number. Numbers are in a fixed shuffled order, so that a run that is cut short has
    tried a sample of all. Numbers that a scenario marks as different kinds come first. After a
    failure, a crash or a hang, new processes continue with the remaining numbers.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stress.results import Failure, Result

MOST_FAILURES = 20

Trial = Callable[[int], str | None]
"""Try one number: why it failed, empty if it passed, None if it does not count."""


@dataclass
class Job:
    """Input of a scenario's process.

    Attributes:
        folder: an empty folder for these processes only.
        seed: of all random numbers.
        count: number of trials on the command line; 0 for the scenario's own.
        rank: of this process.
        notes: figures to print, by name; filled by the scenario.
        early: numbers to try first; filled by the scenario, the same on all ranks.
    """

    folder: Path
    seed: int
    count: int
    rank: int
    notes: dict[str, str] = field(default_factory=dict)
    early: frozenset[int] = frozenset()

    def random(self, number: int) -> random.Random:
        """Return a trial's random generator: the same for the same seed and number."""
        return random.Random(f"{self.seed}:{number}")


@dataclass(frozen=True)
class Scenario:
    """A check that runs many times.

    Attributes:
        kind: one of the five.
        name: unique within its kind.
        prepare: run in each process; returns the number of trials, and the trial function.
        ranks: processes that try each number together.
        first: the first number.
        patience_s: a trial that takes longer counts as a hang.
        in_order: whether numbers must run in order, all in one process.
    """

    kind: str
    name: str
    prepare: Callable[[Job], tuple[int, Trial]]
    ranks: int = 1
    first: int = 0
    patience_s: float = 300.0
    in_order: bool = False


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    seed: int = 0
    count: int = 0
    every: int = 1
    number: int | None = None

    def numbers(
        self, scenario: Scenario, total: int, early: frozenset[int] = frozenset()
    ) -> list[int]:
        """Return the numbers to try, in order; `early` ones first."""
        if self.number is not None and not scenario.in_order:
            return [self.number]
        found = list(range(scenario.first, scenario.first + total))
        if scenario.in_order:
            return found
        random.Random(self.seed).shuffle(found)
        found.sort(key=lambda number: number not in early)
        return found[: self.count or None][:: self.every]


def run_scenario(scenario: Scenario, asked: Asked, deadline: float) -> Result:
    """Run a scenario until its numbers or the time are used up."""
    result, start, done = Result(scenario.kind, scenario.name), time.monotonic(), set[int]()
    while True:
        over = _team(scenario, asked, deadline, result, done)
        if over or len(result.failures) >= MOST_FAILURES:
            break
    result.seconds = time.monotonic() - start
    return result


def command(scenario: Scenario, asked: Asked, number: int) -> str:
    """Return the command that repeats one trial."""
    words = ["python -m stress", f"--only {scenario.kind}", f"--scenario {scenario.name}"]
    words += [f"--seed {asked.seed}", f"--number {number}"]
    return " ".join(words)


def _team(
    scenario: Scenario, asked: Asked, deadline: float, result: Result, done: set[int]
) -> bool:
    """Run one set of processes until the first failure; return whether nothing is left to do."""
    folder = Path(tempfile.mkdtemp(prefix="stress-"))
    members = [_start(scenario, asked, folder, rank, done) for rank in range(scenario.ranks)]
    why, left, signals = "", False, []
    try:
        why, left = _watch(scenario, members, deadline, result, done)
    finally:
        signals = [member.end() for member in members]
    if why:
        trying = next((each.trying for each in members if each.trying is not None), None)
        if trying is None:  # while preparing, or after the last trial
            trying, left, why = scenario.first, False, f"outside of a trial: {why}"
        words = [*signals, *(each.last_words(folder) for each in members)]
        said = " / ".join(filter(None, words))
        done.add(trying)
        result.tried += 1
        why = f"number {trying}: {why} {said}".strip()
        result.failures.append(Failure(trying, why, command(scenario, asked, trying)))
        print(f"  failed: {scenario.name} {why[:400]}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return not left or time.monotonic() > deadline


class _Member:
    """A process of a team, seen from the parent."""

    def __init__(self, pid: int, reader: int, rank: int) -> None:
        self.pid, self.reader, self.rank = pid, reader, rank
        self.trying: int | None = None
        self.unread, self.gone = b"", False

    def heard(self) -> list[dict[str, Any]] | None:
        """Return its reports since the last call; None at its end."""
        data = os.read(self.reader, 1 << 16)
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.gone = not data
        return [json.loads(line) for line in lines] if data else None

    def end(self) -> str:
        """Kill it and all its children; return the signal that ended it, in words."""
        ended, status = os.waitpid(self.pid, 0 if self.gone else os.WNOHANG)
        for group in (True, False):
            try:
                (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not ended:
            os.waitpid(self.pid, 0)
        os.close(self.reader)
        code = os.waitstatus_to_exitcode(status) if ended else 0
        return signal.Signals(-code).name if code < 0 else ""

    def last_words(self, folder: Path) -> str:
        """Return the last line of its stderr."""
        try:
            lines = (folder / f"stderr-{self.rank}").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return lines[-1][:300] if lines else ""


def _start(scenario: Scenario, asked: Asked, folder: Path, rank: int, done: set[int]) -> _Member:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Member(pid, read, rank)
    os.setsid()
    os.close(read)
    tempfile.tempdir = str(folder)  # so that all that is left is removed with it
    stderr = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(stderr, 2)
    os.dup2(stderr, 1)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    status = 1
    try:
        faulthandler.enable()
        with os.fdopen(write, "w", encoding="utf-8") as file:
            _try_all(scenario, asked, Job(folder, asked.seed, asked.count, rank), done, file)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _try_all(scenario: Scenario, asked: Asked, job: Job, done: set[int], file: IO[str]) -> None:
    def say(**words: Any) -> None:
        print(json.dumps(words), file=file, flush=True)

    total, trial = scenario.prepare(job)
    numbers = asked.numbers(scenario, total, job.early)
    say(total=len(numbers), early=len(job.early.intersection(numbers)))
    for number in numbers:
        if number in done:
            continue
        say(begin=number)
        try:
            why = trial(number)
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
        say(end=number, why=why)
        done.add(number)
        if why or (why is None and scenario.ranks > 1):  # ranks are no longer in step
            break
    say(over=True, left=not done.issuperset(numbers), notes=job.notes)


def _watch(
    scenario: Scenario, members: list[_Member], deadline: float, result: Result, done: set[int]
) -> tuple[str, bool]:
    """Read reports of the processes; return the first failure, and whether trials are left."""
    ended: Counter[int] = Counter()
    left = False
    nothing: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.reader, selectors.EVENT_READ, member)
        while selector.get_map():
            ready = selector.select(scenario.patience_s)
            if not ready:
                return f"no end after {scenario.patience_s:.0f} s", True
            for key, _ in ready:
                member: _Member = key.data
                said = member.heard()
                if said is None:
                    return f"the process of rank {member.rank} ended", True
                for words in said:
                    if "total" in words:
                        result.total = max(result.total, words["total"])
                        result.early = max(result.early, words["early"])
                    elif "begin" in words:
                        member.trying = words["begin"]
                        if time.monotonic() > deadline:
                            return "", False
                    elif "over" in words:
                        selector.unregister(member.reader)
                        result.notes.update(words["notes"])
                        left = left or words["left"]
                    elif words["why"]:
                        return str(words["why"]), True
                    else:
                        number, member.trying = words["end"], None
                        ended[number] += 1
                        nothing |= {number} if words["why"] is None else set()
                        if ended[number] == len(members):
                            done.add(number)
                            result.skipped += number in nothing
                            result.tried += number not in nothing
    return "", left
