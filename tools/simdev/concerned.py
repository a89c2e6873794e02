"""Say whether a change touches code for devices: `git diff --name-only BASE | concerned.py`.

Prints the files that do; exits with 1 if there are none. A file does if it belongs to the simulated
device, if it is deleted from a package, or if it is source or a test of a package and uses streams,
events, pinned memory or the accelerator.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(r"[Ss]tream\b|\bEvent\b|pin_memory|torch\.accelerator|mark\.accelerator")


def concerned(names: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return those of the changed files that touch code for devices."""
    found = []
    for name in names:
        path = root / name
        is_code = name.startswith("packages/") and path.suffix == ".py"
        if name.startswith("tools/simdev/") or (
            is_code
            and "/benchmarks/" not in name
            and (not path.exists() or WORDS.search(path.read_text(encoding="utf-8")))
        ):
            found.append(name)
    return found


if __name__ == "__main__":
    files = concerned(sys.stdin.read().split())
    print("\n".join(files))
    sys.exit(not files)
