"""Runs nox's own selection of sessions in two lanes at once: `lanes.py LOG`.

One lane is printed as it runs. The other is written to the log and printed at the end; whatever
the first did, it runs to its end too. The last lines name each session that failed, and how it
can be run alone; exits with 1 if there is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOX = [sys.executable, "-m", "nox"]
BESIDE = ("tests(conformance)", "conformance(cpu)", "repository", "isolation")
"""The suite's own tests, and each distribution alone, take as long as the packages' tests."""


def lanes(sessions: list[str]) -> tuple[list[str], list[str]]:
    """Divide sessions: each is in one lane, in the order nox has them."""
    first = [each for each in sessions if not each.startswith(BESIDE)]
    return first, [each for each in sessions if each.startswith(BESIDE)]


def failed(report: Path, sessions: list[str]) -> list[str]:
    """Name the sessions that did not end well, by nox's own report; all if it left none."""
    if not report.is_file():
        return sessions
    told = json.loads(report.read_text())["sessions"]
    good = [each for each in told if each["result"] in ("success", "skipped")]
    well = {name for each in good for name in each["signatures"] or [each["name"]]}
    return [each for each in sessions if each not in well]


def main() -> int:
    """Run both; 1 if either failed."""
    listed = subprocess.run([*NOX, "-l", "--json"], stdout=subprocess.PIPE, check=True)
    first, beside = lanes([each["session"] for each in json.loads(listed.stdout)])
    log = Path(sys.argv[1])
    reports = [log.with_suffix(f".{lane}.json") for lane in ("first", "beside")]
    commands = [
        [*NOX, "--report", str(report), "-s", *names]
        for report, names in zip(reports, (first, beside), strict=True)
    ]
    with log.open("wb") as file:
        other = subprocess.Popen(commands[1], stdout=file, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run(commands[0], check=False).returncode
            other_code = other.wait()
        finally:
            other.kill()
    print(log.read_text(errors="replace"), flush=True)
    bad = failed(reports[0], first) + failed(reports[1], beside)
    for name in bad:
        print(f'failed: {name}  (python -m nox -s "{name}")')
    if not bad:
        print(f"passed: {', '.join(first + beside)}")
    return 1 if bad or code or other_code else 0


if __name__ == "__main__":
    sys.exit(main())
