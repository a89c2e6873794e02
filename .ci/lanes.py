"""Runs nox's own selection of sessions in two lanes at once: `lanes.py LOG`.

One lane is printed as it runs. The other is written to the log and printed at the end; whatever
the first did, it runs to its end too. Exits with 1 if a session of either failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOX = [sys.executable, "-m", "nox"]
BESIDE = ("tests(conformance)", "conformance(cpu)", "repository")
"""The suite's own tests take as long as most packages' together."""


def lanes(sessions: list[str]) -> tuple[list[str], list[str]]:
    """Divide sessions: each is in one lane, in the order nox has them."""
    first = [each for each in sessions if each not in BESIDE]
    return first, [each for each in sessions if each in BESIDE]


def main() -> int:
    """Run both; 1 if either failed."""
    listed = subprocess.run([*NOX, "-l", "--json"], stdout=subprocess.PIPE, check=True)
    first, beside = lanes([each["session"] for each in json.loads(listed.stdout)])
    log = Path(sys.argv[1])
    with log.open("wb") as file:
        other = subprocess.Popen([*NOX, "-s", *beside], stdout=file, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run([*NOX, "-s", *first], check=False).returncode
            other_code = other.wait()
        finally:
            other.kill()
    print(log.read_text(errors="replace"), flush=True)
    for names, ended in ((first, code), (beside, other_code)):
        print(f"{'failed' if ended else 'passed'}: {', '.join(names)}")
    return 1 if code or other_code else 0


if __name__ == "__main__":
    sys.exit(main())
