"""Pure: which requirements caught each broken implementation, and what that says of the suite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchparts_conformance._registry import CLAIMED_BY_ALL, Requirement
from torchparts_conformance._spec_pages import escape


@dataclass(frozen=True)
class Kill:
    """One mutant: what it was to break, and which requirements and cases failed.

    `trouble` says why nothing is known about it, and is empty otherwise.
    """

    area: str
    name: str
    text: str
    declared: tuple[str, ...]
    failed: tuple[str, ...]
    cases: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def is_exact(self) -> bool:
        """Say whether exactly the declared requirements failed."""
        return set(self.declared) == set(self.failed) and not self.trouble

    def __str__(self) -> str:
        if self.is_exact:
            return "exactly as declared"
        return self.trouble or f"declares {list(self.declared)}, but {list(self.failed)} failed"


def problems(kills: Iterable[Kill], registry: Mapping[str, Requirement]) -> list[str]:
    """Say which mutants were not caught as declared, and which MUST has none."""
    kills = list(kills)
    wrong = [f"mutant {k.name} of {k.area}: {k}" for k in kills if not k.is_exact]
    bare = bare_requirements((id for found in kills for id in found.declared), registry)
    return [*wrong, *(f"{id} has no mutant" for id in bare)]


def bare_requirements(killed: Iterable[str], registry: Mapping[str, Requirement]) -> list[str]:
    """Give each MUST of core and robust that no mutant is declared to break."""
    broken = set(killed)
    return [
        r.id
        for r in registry.values()
        if r.level == "MUST" and r.profile in CLAIMED_BY_ALL and r.id not in broken
    ]


def to_markdown(kills: Iterable[Kill], version: str, unfailed: Iterable[str] = ()) -> str:
    """Write the kill matrix as a page.

    Args:
        kills: of every mutant that was run.
        version: of the suite.
        unfailed: cases that no mutant made fail.
    """
    kills, unfailed = list(kills), sorted(unfailed)
    exact = sum(found.is_exact for found in kills)
    lines = [
        f"| {k.area} | `{k.name}` | {escape(k.text)} | {', '.join(k.declared)} | "
        f"{'exactly these' if k.is_exact else escape(k.trouble or ', '.join(k.failed))} | "
        f"{len(k.cases)} |"
        for k in kills
    ]
    rest = [f"- `{case}`" for case in unfailed]
    return "\n".join(
        [
            "# Kill matrix",
            "",
            "Broken implementations, and the requirements that caught each. "
            "This page is written by `torchparts-conformance mutants`.",
            "",
            f"Suite {version} kills {exact} of {len(kills)} mutants exactly as declared.",
            "",
            "| area | mutant | what is broken | has to fail | failed | cases |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            *(["Cases that no mutant made fail:", "", *rest, ""] if rest else []),
        ]
    )
