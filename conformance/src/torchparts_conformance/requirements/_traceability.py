"""Which requirement and which case each source test became."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchparts_conformance import _toml
from torchparts_conformance._package import PACKAGE
from torchparts_conformance.requirements._cases import Case
from torchparts_conformance.requirements._requirement import Requirement

SOURCE_TESTS = PACKAGE / "source_tests.toml"
SOURCE_ROOT = "https://github.com/pytorch/pytorch/blob/v2.13.0/"


@dataclass(frozen=True)
class SourceTest:
    """One test of the source: its area, its file in PyTorch's repository, and its name there."""

    area: str
    path: str
    name: str

    @property
    def key(self) -> str:
        """The file, the class and the name of the test."""
        return f"{Path(self.path).name}::{self.name}"

    @property
    def test(self) -> str:
        """The name of the test alone, as a requirement gives it as its source."""
        return self.name.rpartition("::")[2]

    @property
    def address(self) -> str:
        """Give the page that shows the file."""
        return SOURCE_ROOT + self.path


@dataclass(frozen=True)
class Trace:
    """A source test with the requirements made from it and the cases that check those."""

    source: SourceTest
    requirements: tuple[str, ...]
    cases: tuple[str, ...]


@functools.cache
def source_tests() -> tuple[SourceTest, ...]:
    """Read the list of source tests."""
    areas = _toml.parse(SOURCE_TESTS.read_text(encoding="utf-8"))
    return tuple(
        SourceTest(area, entry["path"], f"{entry['class']}::{name}")
        for area, entry in areas.items()
        for name in entry["tests"]
    )


def source_of(requirement: Requirement) -> SourceTest | None:
    """Return the source test that a requirement names, if it names one."""
    wanted = (requirement.area, requirement.source)
    return next((found for found in source_tests() if (found.area, found.test) == wanted), None)


def trace(
    sources: Iterable[SourceTest],
    registry: Mapping[str, Requirement],
    cases: Mapping[str, Sequence[Case]],
) -> list[Trace]:
    """Follow each source test to its requirements and their cases."""
    by_source: dict[tuple[str, str], list[str]] = {}
    for requirement in registry.values():
        by_source.setdefault((requirement.area, requirement.source), []).append(requirement.id)
    return [
        Trace(
            source,
            tuple(ids := by_source.get((source.area, source.test), [])),
            tuple(dict.fromkeys(case.name for id in ids for case in cases.get(id, ()))),
        )
        for source in sources
    ]


def problems(traces: Iterable[Trace], registry: Mapping[str, Requirement]) -> list[str]:
    """Say which source tests led to nothing, and which requirements name a source that is none."""
    traces = list(traces)
    known = {(found.source.area, found.source.test) for found in traces}
    lost = [f"{t.source.key} has no requirement" for t in traces if not t.requirements]
    idle = [f"{t.source.key} has no case" for t in traces if t.requirements and not t.cases]
    strange = [
        f"{r.id} names {r.source}, which is no source test"
        for r in registry.values()
        if r.source and (r.area, r.source) not in known
    ]
    return [*lost, *idle, *strange]
