"""Edge: runs every mutant through the cases of its area, and says which requirements caught it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchparts_conformance import _report
from torchparts_conformance._cases import CASES
from torchparts_conformance._errors import RegistryError
from torchparts_conformance._registry import AREAS, CLAIMED_BY_ALL, Requirement, folder_of
from torchparts_conformance._spec_pages import escape
from torchparts_conformance.mutants import find_mutants

CAUGHT = ("fail", "error", "not_run")


@dataclass(frozen=True)
class Kill:
    """One mutant: what it was to break, and what failed."""

    area: str
    name: str
    text: str
    declared: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Say whether exactly the declared requirements failed."""
        return set(self.declared) == set(self.failed)


def kill(folder: Path, areas: Iterable[str] = AREAS, *, base: str = "ours") -> list[Kill]:
    """Run every mutant of a folder of `<area>.py` files; each area has a process of its own.

    Raises:
        RegistryError: the working implementation does not pass, so that mutants show nothing.
    """
    kills: list[Kill] = []
    for area in areas:
        for path in sorted(folder.glob(f"{folder_of(area)}*.py")):
            kills += _kill_in_process(path, area, base)
    return kills


def _kill_in_process(path: Path, area: str, base: str) -> list[Kill]:
    command = [sys.executable, "-m", "torchparts_conformance._kill", str(path), area, base]
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        raise RegistryError(
            f"mutants of {area}: the run ended with code {ended.returncode}, but must end well. "
            f"{lines[-1][:300] if lines else 'It printed nothing.'}"
        )
    return [
        Kill(area, name, text, tuple(declared), tuple(failed))
        for name, text, declared, failed in json.loads(lines[-1])
    ]


def _main(path: Path, area: str, base: str) -> int:
    """Run the mutants of one file, one after another, in this process."""
    before = _failed_ids(area, base, None)
    found: list[tuple[str, str, list[str], list[str]]] = []
    for mutant in find_mutants(path):
        failed = _failed_ids(area, base, f"{path}::{mutant.name}")
        found.append((mutant.name, mutant.text, sorted(mutant.kills), sorted(failed)))
        mark = "exact" if failed == set(mutant.kills) else f"NOT EXACT: {sorted(failed)}"
        sys.stderr.write(f"{area} {mutant.name}: {mark}\n")
    after = _failed_ids(area, base, None)
    if before or after:
        print(f"without a mutant {sorted(before | after)} fail, but nothing must")
        return 1
    print(json.dumps(found))
    return 0


def _failed_ids(area: str, base: str, mutant: str | None) -> set[str]:
    options = [f"--impl={base}", f"--area={area}", *([f"--mutant={mutant}"] if mutant else [])]
    with tempfile.TemporaryDirectory() as folder:
        with open(os.devnull, "w") as quiet:
            shown, sys.stdout = sys.stdout, quiet
            try:
                pytest.main([*_SETTINGS, *options, f"--out={folder}"])
            finally:
                sys.stdout = shown
        report = Path(folder) / "report.json"
        rows = _report.read(report)["rows"] if report.exists() else []
    if not rows:
        raise RegistryError(f"area {area!r} has no rows, but its cases are needed.")
    return {row["id"] for row in rows if row["outcome"] in CAUGHT}


_SETTINGS = [
    *(str(CASES), f"--rootdir={CASES}", "-c", str(CASES / "pytest.ini")),
    *("-p", "torchparts_conformance.plugin", "-p", "no:terminal"),
]


def problems(kills: Iterable[Kill], registry: Mapping[str, Requirement]) -> list[str]:
    """Say which mutants were not caught as declared, and which MUST has none.

    Pure.
    """
    kills = list(kills)
    wrong = [
        f"mutant {k.name} of {k.area} declares {list(k.declared)}, but {list(k.failed)} failed"
        for k in kills
        if not k.is_exact
    ]
    killed = {id for found in kills for id in found.declared}
    bare = [
        f"{r.id} has no mutant"
        for r in registry.values()
        if r.level == "MUST" and r.profile in CLAIMED_BY_ALL and r.id not in killed
    ]
    return [*wrong, *bare]


def to_markdown(kills: Iterable[Kill], version: str) -> str:
    """Write the kill matrix as a page.

    Pure.
    """
    kills = list(kills)
    exact = sum(found.is_exact for found in kills)
    lines = [
        f"| {k.area} | `{k.name}` | {escape(k.text)} | {', '.join(k.declared)} | "
        f"{'exactly these' if k.is_exact else 'failed: ' + ', '.join(k.failed)} |"
        for k in kills
    ]
    return "\n".join(
        [
            "# Kill matrix",
            "",
            "Broken implementations, and the requirements that caught each. "
            "This page is written by `torchparts-conformance mutants`.",
            "",
            f"Suite {version} kills {exact} of {len(kills)} mutants exactly as declared.",
            "",
            "| area | mutant | what is broken | has to fail | failed |",
            "|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
