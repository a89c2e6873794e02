"""What a yearly review of the requirements looks at, from the registry, the lists and the reports.

Rule 1: implementations that name a distribution in common count as one: they are not independent.
Rule 2: who was not asked, or lacks what a case needs, is no evidence for or against.
Rule 3: after the first version of the suite a requirement of core or robust begins as a SHOULD.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchparts_conformance.render._text import markdown
from torchparts_conformance.report import _outcomes
from torchparts_conformance.requirements._addresses import addresses
from torchparts_conformance.requirements._history import FrozenList
from torchparts_conformance.requirements._registry import AREAS, CLAIMED_BY_ALL, Requirement
from torchparts_conformance.subject._identity import printable

INDEPENDENT = 2
_TRIED = ("pass", "fail", "error", "xfail", "xpass")
_HEAD = """# Yearly review

Each November a maintainer of the suite and a maintainer of a judged implementation that is not
ours read this page and decide for each SHOULD whether it becomes a MUST, stays, or is withdrawn.
`torchparts-conformance review docs/conformance` writes it from the requirements, the frozen lists
and the published reports.

## The rule

1. A SHOULD becomes a MUST when all of these hold: a released list has had it for a year; {least}
   independent implementations satisfy it; a users' thread shows the harm of not having it; no
   dispute about its case is open.
2. A SHOULD that fewer than {least} satisfy after two years is withdrawn, or its requirement says
   why it stays. A withdrawn id is never used again.
3. A MUST becomes a SHOULD when a dispute about it is decided that way; its case stays.
4. A decision takes effect with the next version of the suite. Badges already earned stay valid,
   because an older list can still [judge](write-an-adapter.md#judge-by-an-older-list).
5. In versions after the first, a requirement of `core` or `robust` begins as a SHOULD, so that
   no badge is lost without notice. A capability is claimed, and may begin as a MUST.

Implementations that share a distribution are not independent: what torch has under several names
counts once.

"""


@dataclass(frozen=True)
class Evidence:
    """What speaks for or against a requirement.

    Attributes:
        passed: independent implementations that satisfy it, by name.
        failed: those that were asked and do not.
        threads: pages where users suffer.
    """

    requirement: Requirement
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    threads: tuple[str, ...]

    def stands(self, years: float) -> str:
        """Say what the rule makes of it after a time in released lists."""
        if len(self.passed) >= INDEPENDENT and years >= 1 and self.threads:
            return "may become a MUST"
        if len(self.passed) < INDEPENDENT and years >= 2:
            return "withdraw, or say why it stays"
        return "stays"


def evidence(
    requirements: Iterable[Requirement], reports: Iterable[Mapping[str, Any]]
) -> list[Evidence]:
    """Give the evidence of each requirement, from reports on any device."""
    makers = _makers(reports)
    made = []
    for r in requirements:
        outcomes = {name: found[r.id] for name, found in makers.items() if r.id in found}
        passed = [name for name, words in outcomes.items() if "pass" in words]
        failed = [name for name in outcomes if name not in passed]
        threads = addresses(f"{r.rationale} {r.torch_deviation}")
        made.append(Evidence(r, tuple(passed), tuple(failed), tuple(dict.fromkeys(threads))))
    return made


def _makers(reports: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """Give the outcomes by requirement of what was tried, by those who made an implementation."""
    names: dict[frozenset[str], str] = {}
    found: dict[str, dict[str, set[str]]] = {}
    for report in reports:
        who = report["implementation"]
        parts = frozenset(part["name"] for part in who["distributions"]) or frozenset({who["name"]})
        known = next((name for other, name in names.items() if other & parts), None)
        name = known or printable(who["name"])
        names[parts] = name
        for id, outcome in _worst(report["rows"]).items():
            if outcome in _TRIED:
                found.setdefault(name, {}).setdefault(id, set()).add(outcome)
    return found


def _worst(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    outcomes: dict[str, list[str]] = {}
    for row in rows:
        outcomes.setdefault(row["id"], []).append(row["outcome"])
    return {id: _outcomes.worst(found) for id, found in outcomes.items()}


def problems(registry: Mapping[str, Requirement], lists: Sequence[FrozenList]) -> list[str]:
    """Say which requirement began as a MUST, but may not have (Rule 3).

    Args:
        registry: of the installed suite.
        lists: of every version, oldest first.
    """
    known = set(lists[0].requirements) if lists else set(registry)
    found = []
    for made in lists[1:]:
        new = {id: r for id, r in made.requirements.items() if id not in known and id in registry}
        known |= set(new)
        found += [
            f"{id} began as a MUST of {r.profile} in {made.version}, but there it begins as a "
            "SHOULD and becomes a MUST by a review"
            for id, r in new.items()
            if r.profile in CLAIMED_BY_ALL and r.level == "MUST"
        ]
    return found


def to_markdown(
    found: Sequence[Evidence], released: Mapping[str, datetime.date], day: datetime.date
) -> str:
    """Write the page.

    Args:
        found: the evidence of every requirement, of whatever level.
        released: the day each version of the suite was published; one that was not is absent.
        day: of the review.
    """
    softer = [e for e in found if e.requirement.level != "MUST"]
    return "\n".join(
        [
            _HEAD.format(least=INDEPENDENT) + f"## As of {day.isoformat()}",
            "",
            *(_table(softer, released, day) if softer else _NONE),
            "",
            "## What each MUST rests on",
            "",
            "A MUST that only one independent implementation satisfies is where a dispute would",
            "begin. The table counts the requirements that were tried, by how many satisfy them.",
            "",
            "| area | MUST | by two or more | by one | by none that was tried | with a thread |",
            "|---|---|---|---|---|---|",
            *(_row(area, found) for area in AREAS),
            "",
        ]
    )


_NONE = (
    "There is no SHOULD and no MAY: every requirement of the first version is a MUST, so that",
    "there is nothing to decide about. By rule 5 the next versions bring some.",
)


def _table(
    found: Sequence[Evidence], released: Mapping[str, datetime.date], day: datetime.date
) -> list[str]:
    lines = [
        "| requirement | since | satisfied by | not by | threads | by the rule |",
        "|---|---|---|---|---|---|",
    ]
    for e in found:
        r = e.requirement
        first = released.get(r.since)
        years = (day - first).days / 365.25 if first else 0.0
        cells = (
            f"[{r.id}](spec-{r.area}.md#{r.id.lower()}) {r.level}: {markdown(r.text)}",
            r.since if first else f"{r.since}, not released",
            _names(e.passed),
            _names(e.failed),
            " ".join(f"[{n}]({page})" for n, page in enumerate(e.threads, 1)) or "none",
            e.stands(years),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _names(names: Sequence[str]) -> str:
    return f"{len(names)}: {markdown(', '.join(names))}" if names else "none"


def _row(area: str, found: Sequence[Evidence]) -> str:
    musts = [e for e in found if (e.requirement.area, e.requirement.level) == (area, "MUST")]
    several = sum(len(e.passed) >= INDEPENDENT for e in musts)
    one = sum(len(e.passed) == 1 for e in musts)
    none = sum(not e.passed and bool(e.failed) for e in musts)
    threads = sum(bool(e.threads) for e in musts)
    return f"| {area} | {len(musts)} | {several} | {one} | {none} | {threads} |"
