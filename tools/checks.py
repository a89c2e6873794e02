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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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


def run(checks: Sequence[Check], extra: Sequence[str] = ()) -> int:
    """Run checks in lanes, and print how long each took; return 1 if any failed."""
    lock, running = threading.Lock(), set[subprocess.Popen[bytes]]()
    took_s, failures = dict[str, float](), set[str]()

    def run_one(check: Check) -> None:
        with tempfile.TemporaryFile() as output:
            began = time.monotonic()
            command = check.arguments(extra)
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
            running.add(process)
            if process.wait():
                failures.add(check.name)
            running.discard(process)
            took_s[check.name] = time.monotonic() - began
            verdict = "failed" if check.name in failures else "passed"
            output.seek(0)
            with lock:
                print(f"\n===== {check.name}: {verdict}, {took_s[check.name]:.0f} s", flush=True)
                print(output.read().decode(errors="replace"), flush=True)

    with ThreadPoolExecutor(LANES) as pool:
        try:
            list(pool.map(run_one, checks))
        finally:  # also after an interrupt
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                process.kill()
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
