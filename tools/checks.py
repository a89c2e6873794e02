"""Run the checks that need torch, three at a time: tests of ranks often wait.

    python tools/checks.py                        all of them
    python tools/checks.py flat-param             one
    python tools/checks.py flat-param -- -k clip  one, with options of its command
    python tools/checks.py --list

Each lane takes the longest check that is left. The output of a check is printed when it ends. All
checks run, whatever the others return. Exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "--timeout=600", "--durations=5", "-m", "not nightly")
LANES = 3
GUIDES = ("README.md", "docs/*.md", "docs/how-*/*.md")


@dataclass(frozen=True)
class Check:
    """One command, run with this Python in the root of the repository.

    Attributes:
        name: how it is selected.
        command: arguments of Python; paths may be patterns.
    """

    name: str
    command: tuple[str, ...]

    def arguments(self, extra: Sequence[str] = ()) -> list[str]:
        """Return the whole command, with patterns replaced by the files they match."""
        found = [sys.executable]
        for word in self.command:
            matches = sorted(ROOT.glob(word)) if "*" in word else [word]
            found += [str(match) for match in matches]
        return [*found, *extra]


def of_package(name: str) -> Check:
    """Return the tests of a package, and of the code in its docstrings and pages."""
    folder = f"packages/{name}"
    pages = (f"{folder}/README.md", f"docs/{name}/*.md")
    return Check(name, (*PYTEST, f"{folder}/tests", f"{folder}/src", *pages))


# The longest first, so that all lanes end together.
CHECKS = (
    of_package("sac-policies"),
    of_package("flat-param"),
    Check("repository", (*PYTEST, "tests/repository", *GUIDES)),
    Check(
        "conformance",
        (
            *("-m", "torchparts_conformance", "run", "--impl", "ours", "--device", "cpu"),
            *("--out", "conformance-output/cpu"),
        ),
    ),
    of_package("ckpt-wrap"),
    Check("suite", (*PYTEST, "conformance/tests", "conformance/README.md")),
    of_package("mod-tracker"),
    Check("types", ("-m", "mypy", "packages/*/src", "conformance/src")),
)


class Lane:
    """Runs checks one after another while any are left.

    Attributes:
        took_s: seconds of each check that ended here.
        failed: names of checks that returned another status than 0.
    """

    def __init__(self, left: deque[Check], extra: Sequence[str], lock: threading.Lock) -> None:
        self._left, self._extra, self._lock = left, extra, lock
        self._process: subprocess.Popen[bytes] | None = None
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def run(self) -> None:
        """Take checks until none is left."""
        while self._left:
            try:
                check = self._left.popleft()
            except IndexError:  # the other lane was faster
                return
            with tempfile.TemporaryFile() as output:
                began = time.monotonic()
                self._process = subprocess.Popen(
                    check.arguments(self._extra), cwd=ROOT, stdout=output, stderr=output
                )
                if self._process.wait():
                    self.failed.add(check.name)
                self.took_s[check.name] = time.monotonic() - began
                self._print(check, output)

    def _print(self, check: Check, output: IO[bytes]) -> None:
        output.seek(0)
        verdict = "failed" if check.name in self.failed else "passed"
        with self._lock:
            print(f"\n===== {check.name}: {verdict}, {self.took_s[check.name]:.0f} s", flush=True)
            print(output.read().decode(errors="replace"), flush=True)

    def stop(self) -> None:
        """End the process that runs now."""
        if self._process is not None:
            self._process.kill()


def run(checks: Sequence[Check], extra: Sequence[str] = ()) -> int:
    """Run checks in lanes, and print how long each took; return 1 if any failed."""
    left, lock = deque(checks), threading.Lock()
    lanes = [Lane(left, extra, lock) for _ in range(LANES)]
    threads = [threading.Thread(target=lane.run) for lane in lanes]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:  # also after an interrupt
        left.clear()
        while any(thread.is_alive() for thread in threads):
            for lane in lanes:
                lane.stop()
            threads[0].join(0.1)
    took_s = {name: seconds for lane in lanes for name, seconds in lane.took_s.items()}
    failures = {name for lane in lanes for name in lane.failed}
    for name in sorted(took_s, key=lambda each: -took_s[each]):
        print(f"{took_s[name]:5.0f} s  {name}")
    failed = [check.name for check in checks if check.name in failures]
    for name in failed:
        print(f"failed: {name}  (nox -s tests -- {name})")
    if not failed:
        print(f"passed: {', '.join(check.name for check in checks)}")
    return int(bool(failed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected checks."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [check.name for check in CHECKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="list the checks and their commands")
    options = parser.parse_args(given[:cut])
    if options.list:
        for check in CHECKS:
            print(f"{check.name:<14}python {' '.join(check.command)}")
        return 0
    if unknown := sorted({*options.names} - {*names}):
        parser.error(f"no check is named {', '.join(unknown)}; there are {', '.join(names)}")
    if given[cut + 1 :] and len(options.names) != 1:
        parser.error("options after -- go to one check: name it")
    chosen = [check for check in CHECKS if check.name in options.names or not options.names]
    return run(chosen, given[cut + 1 :])


if __name__ == "__main__":
    sys.exit(main())
