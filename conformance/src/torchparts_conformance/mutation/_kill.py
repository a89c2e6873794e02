"""Which requirements caught each broken implementation, and what that says of the suite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchparts_conformance.render._spec_pages import escape
from torchparts_conformance.requirements._registry import CLAIMED_BY_ALL, Requirement


@dataclass(frozen=True)
class Kill:
    """One mutant: what it was to break, and which requirements and cases failed.

    `failure` says why nothing is known about it, and is empty otherwise.
    """

    area: str
    name: str
    text: str
    declared: tuple[str, ...]
    failed: tuple[str, ...]
    cases: tuple[str, ...] = ()
    failure: str = ""

    @property
    def is_exact(self) -> bool:
        """Say whether exactly the declared requirements failed."""
        return set(self.declared) == set(self.failed) and not self.failure

    def __str__(self) -> str:
        if self.is_exact:
            return "exactly as declared"
        return self.failure or f"declares {list(self.declared)}, but {list(self.failed)} failed"


def problems(kills: Iterable[Kill], registry: Mapping[str, Requirement]) -> list[str]:
    """Say which mutants were not caught as declared, and which MUST has none."""
    kills = list(kills)
    wrong = [f"mutant {k.name} of {k.area}: {k}" for k in kills if not k.is_exact]
    bare = bare_requirements((id for found in kills for id in found.declared), registry)
    return [*wrong, *(f"{id} has no mutant" for id in bare)]


def bare_requirements(killed: Iterable[str], registry: Mapping[str, Requirement]) -> list[str]:
    """Give each MUST of core and robust that no mutant is declared to break."""
    return [id for id in unbroken(killed, registry) if registry[id].profile in CLAIMED_BY_ALL]


def unbroken(killed: Iterable[str], registry: Mapping[str, Requirement]) -> list[str]:
    """Give each MUST, of whatever profile, that no mutant is declared to break."""
    broken = set(killed)
    return [r.id for r in registry.values() if r.level == "MUST" and r.id not in broken]


def to_markdown(
    kills: Iterable[Kill], registry: Mapping[str, Requirement], cases: Iterable[str], version: str
) -> str:
    """Write the kill matrix as a page, with what no mutant made fail.

    Args:
        kills: of every mutant that was run.
        registry: the requirements of the areas that were run.
        cases: names of all cases of these areas.
        version: of the suite.
    """
    kills = list(kills)
    exact = sum(found.is_exact for found in kills)
    intact = unbroken((id for found in kills for id in found.declared), registry)
    unfailed = sorted(set(cases) - {case for found in kills for case in found.cases})
    must = sum(r.level == "MUST" for r in registry.values())
    return "\n".join(
        [
            "# Kill matrix",
            "",
            "Broken implementations, and the requirements that caught each. "
            "This page is written by `torchparts-conformance mutants`.",
            "",
            f"Suite {version} kills {exact} of {len(kills)} mutants exactly as declared. "
            f"They break {must - len(intact)} of {must} MUST requirements.",
            "",
            "| area | mutant | what is broken | has to fail | failed | cases |",
            "|---|---|---|---|---|---|",
            *map(_line, kills),
            "",
            *_listed("MUST requirements that no mutant is declared to break:", intact),
            *_listed("Cases that no mutant made fail:", unfailed),
        ]
    )


def _line(kill: Kill) -> str:
    failed = "exactly these" if kill.is_exact else kill.failure or ", ".join(kill.failed)
    words = (escape(kill.text), ", ".join(kill.declared), escape(failed), str(len(kill.cases)))
    return f"| {kill.area} | `{kill.name}` | {' | '.join(words)} |"


def _listed(title: str, names: Iterable[str]) -> list[str]:
    lines = [f"- `{name}`" for name in names]
    return [title, "", *lines, ""] if lines else []
