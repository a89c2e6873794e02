"""Runs nox's own selection of sessions in two lanes at once: `lanes.py LOG`.

Each lane takes the longest session that is left, until none is. What one lane runs is printed as
it runs; the other's is written to the log and printed at the end. All sessions are run, whatever
the others did. The last lines say how long each took, and name each that failed and how it can be
run alone; exits with 1 if there is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

NOX = [sys.executable, "-m", "nox"]
LONGEST = (
    *("tests(flat-param)", "tests(sac-policies)", "tests(simdev)", "repository"),
    *("conformance(cpu)", "tests(ckpt-wrap)", "tests(conformance)", "tests(mod-tracker)"),
)
"""Begun first, in this order, so that both lanes end together; the others take about a minute."""


def longest_first(sessions: list[str]) -> list[str]:
    """Put those that take long before all others, which stay in nox's order."""
    place = {name: number for number, name in enumerate(LONGEST)}
    return sorted(sessions, key=lambda each: place.get(each, len(place)))


class Lane:
    """Runs one session after another, each in a nox of its own, while there are any left.

    Attributes:
        took_s: of each session that ended here.
        failed: those that did not end well, by nox's exit code or by its own report.
    """

    def __init__(self, left: deque[str], reports: Path, out: IO[bytes] | None = None) -> None:
        self._left, self._reports, self._out = left, reports, out
        self._process: subprocess.Popen[bytes] | None = None
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def run(self) -> None:
        """Take sessions from what is left, from the first on."""
        while self._left:
            try:
                name = self._left.popleft()
            except IndexError:  # the other lane was faster
                return
            report = self._reports / f"report-{name}.json"
            began = time.monotonic()
            self._process = subprocess.Popen(
                [*NOX, "--report", str(report), "-s", name], stdout=self._out, stderr=self._out
            )
            if self._process.wait() or not went_well(report):
                self.failed.add(name)
            self.took_s[name] = time.monotonic() - began

    def stop(self) -> None:
        """End what runs now."""
        if self._process is not None:
            self._process.kill()


def went_well(report: Path) -> bool:
    """Whether nox says of every session of its report that it ended well; not if it left none."""
    if not report.is_file():
        return False
    told = json.loads(report.read_text())["sessions"]
    return all(each["result"] in ("success", "skipped") for each in told)


def main() -> int:
    """Run all; 1 if one failed."""
    listed = subprocess.run([*NOX, "-l", "--json"], stdout=subprocess.PIPE, check=True)
    sessions = [each["session"] for each in json.loads(listed.stdout)]
    log = Path(sys.argv[1])
    left = deque(longest_first(sessions))
    with log.open("wb") as file:
        shown, beside = Lane(left, log.parent), Lane(left, log.parent, file)
        other = threading.Thread(target=beside.run)
        other.start()
        try:
            shown.run()
            other.join()
        finally:  # also where the user stops it
            left.clear()
            shown.stop()
            while other.is_alive():
                beside.stop()
                other.join(0.1)
    print(log.read_text(errors="replace"), flush=True)
    took_s = shown.took_s | beside.took_s
    for name in sorted(took_s, key=lambda each: -took_s[each]):
        print(f"{took_s[name]:5.0f} s  {name}")
    bad = [name for name in sessions if name in shown.failed | beside.failed]
    for name in bad:
        print(f'failed: {name}  (python -m nox -s "{name}")')
    if not bad:
        print(f"passed: {', '.join(sessions)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
