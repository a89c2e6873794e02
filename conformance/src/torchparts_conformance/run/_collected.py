"""The cases that pytest collected, which of them run in what order, and what each one checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from torchparts_conformance._errors import RegistryError
from torchparts_conformance.requirements._needs import Needs, needs_of
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.run import _order
from torchparts_conformance.run._case_result import (
    CaseResult,
    area_of_path,
    case_name,
    device_of,
    is_case_path,
)


class Collected:
    """The result of every case that checks something on its device, in the order of collection.

    Attributes:
        problems: files of cases that could not be imported, and why.
    """

    def __init__(self, registry: Mapping[str, Requirement]) -> None:
        """Start without cases; `registry` has the requirements that cases may name."""
        self._registry = registry
        self._results: dict[str, CaseResult] = {}
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[CaseResult]:
        return iter(self._results.values())

    def __getitem__(self, item: pytest.Item) -> CaseResult:
        return self._results[item.nodeid]

    def find(self, item: pytest.Item) -> CaseResult | None:
        """Give the result of an item; none if it is no case, or checks nothing on its device."""
        return self._results.get(item.nodeid)

    def take(self, cases: Iterable[pytest.Item]) -> None:
        """Take every case before selection.

        Raises:
            RegistryError: a case names a requirement that does not exist.
        """
        for item in cases:
            device = device_of(item)
            wanted = tuple(r for r in self._requirements(item) if r.is_for(device))
            if wanted:
                self._results[item.nodeid] = CaseResult(
                    case_name(item), device, wanted, needs=_needs(item)
                )

    def broken(self, path: Path, why: str) -> None:
        """Note that a file of cases could not be imported.

        Args:
            path: of the file.
            why: as pytest tells it; the last line that says an error is what counts.
        """
        lines = [line.strip() for line in why.splitlines() if line.strip()]
        errors = [line[1:].strip() for line in lines if line.startswith("E ")]
        error = (errors or lines or ["no reason is known"])[-1]
        self.problems.append(f"{path.parent.name}/{path.name} cannot be imported: {error}")

    def _requirements(self, item: pytest.Item) -> list[Requirement]:
        ids = [id for mark in item.iter_markers("requirement") for id in mark.args]
        unknown = [id for id in ids if id not in self._registry]
        if unknown or not ids:
            raise RegistryError(
                f"case {case_name(item)} names {unknown or 'no requirement'}, but a case names ids "
                "that a case of its area declares. Declare it, or correct the id."
            )
        return [self._registry[id] for id in dict.fromkeys(ids)]

    def arranged(
        self, items: Iterable[pytest.Item], *, order: str, requirements: Collection[str]
    ) -> list[pytest.Item]:
        """Leave out cases with nothing to check on their device; give the rest as asked for.

        Args:
            items: all that pytest collected, cases or not.
            order: as `--order` has it.
            requirements: where there are any, only their cases stay.

        Raises:
            OptionError: the order is unknown.
        """
        kept = [i for i in items if not is_case_path(i.path) or self.find(i)]
        if requirements:
            kept = [i for i in kept if self._checks(i, requirements)]
        return _order.ordered(kept, order)

    def _checks(self, item: pytest.Item, ids: Collection[str]) -> bool:
        entry = self.find(item)
        return entry is not None and any(r.id in ids for r in entry.requirements)


def _needs(item: pytest.Item) -> Needs:
    """Give what an item's case needs of the part."""
    function = getattr(item, "originalname", item.name)
    return needs_of(item.path, function, combined=area_of_path(item.path) == "combined")
