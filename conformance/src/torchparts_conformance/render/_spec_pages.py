"""One page for each area, written from the requirements and the cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchparts_conformance.requirements._areas import AREAS, GROUPS, folder_of
from torchparts_conformance.requirements._cases import Case, cases_by_id, load_registry
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.requirements._traceability import source_of


def pages() -> dict[str, str]:
    """Give the text of each page by file name, for the requirements of this suite."""
    registry, cases = load_registry(), cases_by_id()
    return {
        f"spec-{area}.md": page(area, [r for r in registry.values() if r.area == area], cases)
        for area in AREAS
    }


def page(
    area: str,
    requirements: Iterable[Requirement],
    cases: Mapping[str, Sequence[Case]],
) -> str:
    """Write the page of one area."""
    requirements = list(requirements)
    groups = [f"| `{name}` | {escape(text)} |" for name, text in GROUPS.get(area, {}).items()]
    divided = [
        "`core` and `robust` are divided into groups that can stand alone. A group of which an "
        "implementation has nothing does not count; a group that it has in part, it must have in "
        "full.",
        *("", "| group | about |", "|---|---|", *groups, ""),
    ]
    lines = [
        f"# {area}: requirements",
        "",
        "Each requirement is declared by the first of its cases, in "
        f"`torchparts_conformance/cases/{folder_of(area)}`.",
        "",
        *(divided if groups else ()),
        "| id | level | profile | devices | requirement |",
        "|---|---|---|---|---|",
        *(_line(requirement) for requirement in requirements),
        "",
        *(line for r in requirements for line in _section(r, cases.get(r.id, ()))),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _line(requirement: Requirement) -> str:
    r = requirement
    link = f"[{r.id}](#{r.id.lower()})"
    return f"| {link} | {r.level} | {r.profile} | {', '.join(r.devices)} | {escape(r.text)} |"


def _section(requirement: Requirement, cases: Iterable[Case]) -> list[str]:
    r = requirement
    source = source_of(r)
    came_from = f"source test [`{source.key}`]({source.address})" if source else ""
    facts = [
        f"{r.level}, profile `{r.profile}`{_in_group(r)}, {' and '.join(r.devices)}, "
        f"since {r.since}",
        came_from,
        f"why: {escape(r.rationale)}" if r.rationale else "",
        f"torch's own deviates: {escape(r.torch_deviation)}" if r.torch_deviation else "",
        *(f"case `{case.name}`: {escape(case.text)}" for case in cases),
    ]
    return [f"## {r.id}", "", escape(r.text), "", *(f"- {fact}" for fact in facts if fact), ""]


def _in_group(requirement: Requirement) -> str:
    return f", group `{requirement.group}`" if requirement.group else ""


def escape(text: str) -> str:
    """Keep text from being taken for a table cell, a tag or a second line."""
    flat = " ".join(text.split())
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
