"""Cases as pytest collected them, with the requirements they check and their outcomes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torchparts_conformance import _report
from torchparts_conformance._errors import RegistryError
from torchparts_conformance.requirements._cases import find_cases, function_of
from torchparts_conformance.requirements._needs import Needs, needs_of
from torchparts_conformance.requirements._requirement import Requirement


@dataclass
class CaseResult:
    """One case on one device, with the requirements it checks there and its outcome so far.

    Attributes:
        where: lines of the case and of the adapter in the traceback of an exception.
        missing: name or option that the case needs and the part lacks, or "".
        uses_ranks: whether it starts worker processes.
    """

    case: str
    device: str
    requirements: tuple[Requirement, ...]
    needs: Needs = field(default_factory=Needs)
    uses_ranks: bool = False
    outcome: str = "not_run"
    reason: str = ""
    where: str = ""
    missing: str = ""
    duration_s: float = 0.0

    @property
    def area(self) -> str:
        """The area of the case."""
        return self.requirements[0].area

    def row(self, requirement: Requirement, lacks: tuple[str, str]) -> dict[str, Any]:
        """Return the row of a report for one of the requirements."""
        outcome, reason = lacks if lacks[0] else (self.outcome, self.reason)
        return {
            "id": requirement.id,
            "case": self.case,
            "device": self.device,
            "outcome": outcome,
            "reason": reason[: _report.MAX_TEXT],
            "where": "" if lacks[0] else self.where[: _report.MAX_TEXT],
            "duration_s": round(self.duration_s, 3),
        }


def device_of(item: pytest.Item) -> str:
    """Return the device an item runs on."""
    callspec = getattr(item, "callspec", None)
    return "cpu" if callspec is None else str(callspec.params.get("device", "cpu"))


def case_name(item: pytest.Item) -> str:
    """Name a case by area folder, file, function and parameters, without the device."""
    path = Path(item.path)
    function, bracket, parameters = item.name.partition("[")
    words = [word for word in parameters.rstrip("]").split("-") if word != device_of(item)]
    inside = f"[{'-'.join(words)}]" if bracket and words else ""
    return f"{path.parent.name}/{path.name}::{function}{inside}"


class Collected:
    """All case results, in order of collection.

    Attributes:
        problems: files of cases that could not be imported, with the reason.
    """

    def __init__(self, registry: Mapping[str, Requirement]) -> None:
        """Start without cases; `registry` has the requirements that cases may name."""
        self._registry = registry
        self._results: dict[str, CaseResult] = {}
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[CaseResult]:
        return iter(self._results.values())

    def find(self, item: pytest.Item) -> CaseResult | None:
        """Return the result of an item; None if the item checks no requirement on its device."""
        return self._results.get(item.nodeid)

    def outcome(self, nodeid: str) -> str:
        """Return the outcome of an item so far."""
        found = self._results.get(nodeid)
        return "not_run" if found is None else found.outcome

    def take(self, items: Iterable[pytest.Item]) -> None:
        """Record every case before selection."""
        for item in items:
            device = device_of(item)
            wanted = tuple(r for r in self._requirements(item) if r.is_for(device))
            if wanted:
                function = getattr(item, "originalname", item.name)
                self._results[item.nodeid] = CaseResult(
                    case_name(item),
                    device,
                    wanted,
                    needs_of(item.path, function),
                    "ranks" in getattr(item, "fixturenames", ()),
                )

    def _requirements(self, item: pytest.Item) -> list[Requirement]:
        ids = [id for mark in item.iter_markers("requirement") for id in mark.args]
        unknown = [id for id in ids if id not in self._registry]
        if unknown or not ids:
            raise RegistryError(
                f"case {case_name(item)} names {unknown or 'no requirement'}. Declare it, or "
                "correct the id."
            )
        return [self._registry[id] for id in dict.fromkeys(ids)]

    def note_import_error(self, path: Path, why: str) -> None:
        """Record that a file of cases could not be imported; `why` is pytest's text."""
        lines = [line.strip() for line in why.splitlines() if line.strip()]
        errors = [line[1:].strip() for line in lines if line.startswith("E ")]
        error = (errors or lines or ["no reason is known"])[-1]
        self.problems.append(f"{path.parent.name}/{path.name} cannot be imported: {error}")

    def not_collected(self, areas: Iterable[str], devices: Sequence[str]) -> Iterator[CaseResult]:
        """Return a result for each case of the chosen areas that pytest did not collect."""
        there = {
            (r.id, function_of(entry.case), entry.device)
            for entry in self
            for r in entry.requirements
        }
        areas = set(areas)
        for case in find_cases():
            for id in case.ids if case.area in areas else ():
                for device in devices:
                    requirement, place = self._registry[id], (id, case.name, device)
                    if requirement.is_for(device) and place not in there:
                        yield CaseResult(case.name, device, (requirement,), reason="not collected")


def claimed(
    items: Sequence[pytest.Item], share: Path, uses_ranks: Mapping[str, bool]
) -> Iterator[pytest.Item]:
    """Yield items that this process claims, while other processes claim items of the same run.

    Args:
        items: of this process; every process has the same ones.
        share: `folder/N` for process N; the folder is shared.
        uses_ranks: by node id. The first process claims these cases first, the others last, so that
            worker processes do not compete with other cases.
    """
    numbers = {nodeid: str(n) for n, nodeid in enumerate(sorted(item.nodeid for item in items))}
    is_first = share.name == "0"
    for item in sorted(items, key=lambda i: uses_ranks.get(i.nodeid, False) != is_first):
        try:
            os.close(os.open(share.parent / numbers[item.nodeid], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield item
