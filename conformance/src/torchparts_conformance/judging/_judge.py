"""The process that runs a stranger's code, seen from the one that judges it.

Rule 1: a stranger's code may print as much as it wants; of that, nothing is shown but the last
line, and only if the process gave no report.
Rule 2: the process finds the judge first and the stranger's code last; see `_isolation`.
Rule 3: it writes no file of the results. It tells each outcome as a phase of a case ends, and a
report at the end; what was told once cannot be taken back, and the report has to agree with it.
Rule 4: what it tells counts if it has the word that it was given before the stranger's code was
there. Whatever else arrives where the judge is told came from somebody else.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from torchparts_conformance.run import _progress
from torchparts_conformance.subject import _isolation, _leftovers

FINISHING_S = 60.0
_DRAINING_S = 5.0
_LINE_CHARACTERS = 4096
_TOLD_CHARACTERS = 64 << 20
_COMPLAINT = "ERROR: "
_SUBJECT = "torchparts_conformance.judging._subject_process"


@dataclass
class Ended:
    """How a process ended, and what it told.

    `status` is its exit code, `complaint` what pytest complained of, and `last_line` what it
    printed last. Of what it told, `phases` are outcomes in their order, `replaced` what judges and
    was not what it was, `report` the report's text, and `strange` how much came from elsewhere.
    """

    status: int = 0
    complaint: str = ""
    last_line: str = ""
    phases: list[Mapping[str, Any]] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    report: str | None = None
    strange: int = 0


def run(options: Sequence[str]) -> Ended:
    """Run the cases with the plugin's options, in a process of their own."""
    word = secrets.token_hex(16)
    job = {"word": word, "options": list(options)}
    # Where this is a process of its own, every child it has was brought about by the run.
    is_alone = _isolation.is_isolated()
    if is_alone:
        _leftovers.adopt()
    ended = watch(_isolation.command(_SUBJECT), word, job)
    if is_alone:
        _leftovers.end()
    return ended


def watch(command: Sequence[str], word: str = "", job: Mapping[str, Any] | None = None) -> Ended:
    """Run a command, show how far it is, and wait for it; after Ctrl-C it may give its report.

    Args:
        command: of the process.
        word: what makes something it tells its own.
        job: for its standard input.
    """
    ended = Ended()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_isolation.environment(),
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    listeners = [
        _listening(lambda line: _take_in(line, word, ended), process.stdout, _TOLD_CHARACTERS),
        _listening(lambda line: _note(line, ended), process.stderr, _LINE_CHARACTERS),
    ]
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(json.dumps(job) + "\n")
    ended.status = _wait(process)
    for listener in listeners:
        # What the process started may still hold the pipe; nobody waits for that.
        listener.join(_DRAINING_S)
    return ended


def _wait(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:  # the process got it too, and notes what did not run
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(FINISHING_S)
        process.kill()
        return process.wait()


def _listening(hear: Callable[[str], None], pipe: IO[str], limit: int) -> threading.Thread:
    def listen() -> None:
        with pipe:
            while line := pipe.readline(limit):
                hear(line)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    return listener


def _note(line: str, ended: Ended) -> None:
    if _progress.show(line) or not line.strip():
        return
    ended.last_line = line.strip()
    if line.startswith(_COMPLAINT):
        ended.complaint = line.removeprefix(_COMPLAINT).strip()


def _take_in(line: str, word: str, ended: Ended) -> None:
    """Take in something told; what follows a report, or lacks the word, is somebody else's."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    known = isinstance(told, dict) and bool(word) and told.get("word") == word
    if not known or ended.report is not None:
        ended.strange += 1
        return
    ended.replaced += [str(name) for name in told["replaced"]]
    if "report" in told:
        ended.report = str(told["report"])
    else:
        ended.phases.append(told)


def contradictions(report: Mapping[str, Any], ended: Ended) -> list[str]:
    """Say where a report does not agree with what was told while the cases ran."""
    told: dict[tuple[str, str], set[str]] = {}
    for phase in ended.phases:
        told.setdefault((phase["case"], phase["device"]), set()).add(phase["outcome"])
    found = [f"{ended.strange} lines came from elsewhere"] if ended.strange else []
    said = " ".join(report["problems"])
    found += [f"{name} was replaced unsaid" for name in ended.replaced if name not in said]
    for row in report["rows"]:
        wanted = _NEEDS.get(row["outcome"])
        outcomes = told.get((row["case"], row["device"]), set())
        if wanted is not None and outcomes != {wanted}:
            was = "/".join(sorted(outcomes)) or "not run"
            found.append(f"{row['case']} {row['device']} is {row['outcome']}, but was {was}")
    return found


# What has to have been told of a case, and nothing else, for what a report says of it.
_NEEDS: Mapping[str, str] = {"pass": "pass", "xpass": "pass", "xfail": "fail"}
