"""`python known.py REPORT`: compare the failures on simdev with `known.toml`.

Exits with 0 if they are the same. A listed requirement that passes is an error, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torchparts_conformance.requirements._cases import parse_toml

LIST = Path(__file__).with_name("known.toml")
NOT_FAILED = {"pass", "not_claimed", "not_provided"}


def differences(report: dict, known: dict[str, str]) -> list[str]:
    """Return the differences between the report and the list, one line each."""
    rows = [row for row in report["rows"] if row["device"] == "simdev"]
    if not rows:
        return ["the report is not about simdev"]
    failed = {row["id"]: row for row in rows if row["outcome"] not in NOT_FAILED}
    new = [
        f"{id}: {row['outcome']}, {row['reason']}" for id, row in failed.items() if id not in known
    ]
    return [*new, *(f"{id} is held now: take it off the list" for id in known if id not in failed)]


def main() -> int:
    """Print the differences."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    known = parse_toml(LIST.read_text(encoding="utf-8"))
    found = differences(report, known)
    for line in found:
        print(line)
    print(f"simdev: {len(known)} known failures, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
