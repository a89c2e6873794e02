"""Markdown pages of the site: requirements and results."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchparts_conformance import _report, _results
from torchparts_conformance._results import Result
from torchparts_conformance.requirements._areas import AREAS, CORE, OWN, folder_of, profile_order
from torchparts_conformance.requirements._cases import (
    SOURCE_ROOT,
    Case,
    cases_by_id,
    load_registry,
    source_tests,
)
from torchparts_conformance.requirements._requirement import Requirement, with_links

# Characters without a meaning in Markdown, in a table and in the middle of a line.
_PLAIN = frozenset("-.,/+()'%;? ")
_NOT_RUN = "not run"


def markdown(text: str) -> str:
    """Escape text of a report, so that none of it becomes markup, a link or a mention."""
    flat = " ".join(text.split()).replace("www.", "www\N{ZERO WIDTH SPACE}.")
    return "".join(
        f"&#{ord(c)};" if c in string.punctuation and c not in _PLAIN else c for c in flat
    )


def escape(text: str) -> str:
    """Escape our own text for a table cell, without tags."""
    flat = " ".join(text.split())
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def requirement_pages() -> dict[str, str]:
    """Return the page of each area by file name."""
    registry, cases = load_registry(), cases_by_id()
    return {
        f"spec-{area}.md": requirement_page(
            area, [r for r in registry.values() if r.area == area], cases
        )
        for area in AREAS
    }


def requirement_page(
    area: str, requirements: Sequence[Requirement], cases: Mapping[str, Sequence[Case]]
) -> str:
    """Return the page of one area."""
    lines = [
        f"# {area}: requirements",
        "",
        "Each requirement is declared by the first of its cases, in "
        f"`torchparts_conformance/cases/{folder_of(area)}`.",
        "",
        "| id | level | profile | requirement |",
        "|---|---|---|---|",
        *(
            f"| [{r.id}](#{r.id.lower()}) | {r.level} | {r.profile} | {escape(r.text)} |"
            for r in requirements
        ),
        "",
        *(line for r in requirements for line in _section(r, cases.get(r.id, ()))),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(requirement: Requirement, cases: Iterable[Case]) -> list[str]:
    r = requirement
    source = source_tests().get((r.area, r.source), "")
    file = source.partition("::")[0]
    documented = f'from the documentation of `{r.source}`: "{escape(r.quote)}"'
    facts = [
        f"{r.level}, profile `{r.profile}`, {' and '.join(r.devices)}",
        f"from [`{r.source}`]({SOURCE_ROOT}{file}) of PyTorch" if source else "",
        documented if r.is_documented else "",
        f"why: {with_links(escape(r.rationale))}" if r.rationale else "",
        *(f"case `{case.name}`: {escape(case.text)}" for case in cases),
    ]
    return [f"## {r.id}", "", escape(r.text), "", *(f"- {fact}" for fact in facts if fact), ""]


def results_page(results: Sequence[Result]) -> str:
    """Return the page of all results: runs, counts by profile, and every requirement."""
    registry = load_registry()
    counted = [(result, _counts(result, registry)) for result in results]
    lines = [
        "# Results",
        "",
        "Each cell counts MUST requirements that passed, of those that the implementation "
        "provides. What is not provided is not counted.",
        f"The verdict is about core. The other columns stand beside it: {OWN}.",
        "",
        "| implementation | torch | CPU | accelerator |",
        "|---|---|---|---|",
        *_runs(results),
    ]
    for area in AREAS:
        profiles = {r.profile for r in registry.values() if r.area == area}
        columns = sorted(profiles, key=profile_order)
        rows = [
            f"| {_title(result)} | {' | '.join(counts.get((area, p), '') for p in columns)} |"
            for result, counts in counted
            if any((area, profile) in counts for profile in columns)
        ]
        head = f"| | {' | '.join(columns)} |"
        lines += ["", f"## {area}", "", head, "|---|" + "---|" * len(columns), *rows, ""]
        lines += _cells(area, results, registry)
    return "\n".join(lines) + "\n"


def _title(result: Result) -> str:
    return f"{markdown(result.name)}, {result.device}"


def _runs(results: Sequence[Result]) -> Iterator[str]:
    """Return a row for each implementation, with its runs on the CPU and on an accelerator."""
    for adapter in dict.fromkeys(result.adapter for result in results):
        mine = [result for result in results if result.adapter == adapter]
        on_cpu = [result.date for result in mine if result.device == "cpu"]
        others = [
            ", ".join((result.device, markdown(result.card or "-"), result.date))
            for result in mine
            if result.device != "cpu"
        ]
        who = f"{markdown(mine[0].name)} {markdown(mine[0].version)} | {markdown(mine[0].torch)}"
        yield f"| {who} | {', '.join(on_cpu) or _NOT_RUN} | {'; '.join(others) or _NOT_RUN} |"


def _counts(result: Result, registry: Mapping[str, Requirement]) -> dict[tuple[str, str], str]:
    verdicts = _results.verdicts_of(result, registry)["verdicts"]
    return {
        (v["area"], v["profile"]): _report.counts_of(v).partition(" ")[2]
        for v in verdicts
        if v["verdict"] not in ("not provided", "not claimed")
    }


def _cells(
    area: str, results: Sequence[Result], registry: Mapping[str, Requirement]
) -> Iterator[str]:
    """Return the requirements of an area that each implementation does not pass."""
    ids = [r.id for r in registry.values() if r.area == area]
    yield from ("Requirements that did not pass, those of core in bold:", "")
    for result in results:
        failed = [id for id in ids if result.outcomes.get(id) in ("fail", "error", "xfail")]
        core = {id for id in failed if registry[id].profile == CORE}
        shown = {id: f"[{id}](spec-{area}.md#{id.lower()})" for id in failed}
        links = ", ".join(f"**{link}**" if id in core else link for id, link in shown.items())
        ran = any(result.outcomes.get(id) == "pass" for id in ids)
        if failed or ran:
            yield f"- {_title(result)}: {links or 'none'}"
