"""One page for each area, written from the requirements and the cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchparts_conformance.render import _render
from torchparts_conformance.requirements._cases import Case, cases_by_id
from torchparts_conformance.requirements._registry import (
    AREAS,
    Requirement,
    load_groups,
    load_registry,
)
from torchparts_conformance.requirements._traceability import SourceTest, source_tests


def pages() -> dict[str, str]:
    """Give the text of each page by file name, for the requirements of this suite."""
    registry, cases = load_registry(), cases_by_id()
    addresses = {source.key: source for source in source_tests()}
    return {
        f"spec-{area}.md": page(
            area, [r for r in registry.values() if r.area == area], cases, addresses
        )
        for area in AREAS
    }


def page(
    area: str,
    requirements: Iterable[Requirement],
    cases: Mapping[str, Sequence[Case]],
    sources: Mapping[str, SourceTest],
) -> str:
    """Write the page of one area."""
    requirements = list(requirements)
    groups = [f"| `{name}` | {escape(text)} |" for name, text in load_groups(area).items()]
    divided = [
        "`core` and `robust` are divided into groups that can stand alone. A group of which an "
        "implementation has nothing does not count; a group that it has in part, it must have in "
        "full.",
        *("", "| group | about |", "|---|---|", *groups, ""),
    ]
    lines = [
        f"# {area}: requirements",
        "",
        "This page is written by `torchparts-conformance spec`; "
        f"edit `spec/{area.replace('-', '_')}.toml` instead.",
        "",
        *(divided if groups else ()),
        "| id | level | profile | devices | requirement |",
        "|---|---|---|---|---|",
        *(_line(requirement) for requirement in requirements),
        "",
        *(line for r in requirements for line in _section(r, cases.get(r.id, ()), sources)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _line(requirement: Requirement) -> str:
    r = requirement
    link = f"[{r.id}](#{r.id.lower()})"
    return f"| {link} | {r.level} | {r.profile} | {', '.join(r.devices)} | {escape(r.text)} |"


def _section(
    requirement: Requirement, cases: Iterable[Case], sources: Mapping[str, SourceTest]
) -> list[str]:
    r = requirement
    source = sources.get(r.source)
    came_from = f"source test [`{r.source}`]({source.address})" if source else ""
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


def drift(folder: Path) -> list[str]:
    """Give the names of pages in a folder that are not what would be written now."""
    return _render.stale(folder, pages())
