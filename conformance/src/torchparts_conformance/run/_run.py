"""One run of the suite inside pytest: what has to run, what happened, and the report."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import torchparts_conformance
from torchparts_conformance import _console
from torchparts_conformance.render import _render, _summary
from torchparts_conformance.report import _known_failures, _report
from torchparts_conformance.requirements._cases import find_cases, load_registry
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.run import _case_outcome, _rows
from torchparts_conformance.run._case_result import CaseResult
from torchparts_conformance.run._collected import Collected
from torchparts_conformance.run._options import CASE_LIMIT_S
from torchparts_conformance.run._progress import Progress
from torchparts_conformance.run._time_limit import time_limit
from torchparts_conformance.subject import _adapters, _devices, _identity, _isolation, _tamper
from torchparts_conformance.subject._claims import Claims, refuse_unknown
from torchparts_conformance.subject._missing import unfit_torch, why_missing
from torchparts_conformance.subject._ranks import shared_pool
from torchparts_conformance.subject._subject import Subject

SEED = 0
_NOT_ASKED = ("not_claimed", "not_provided", "no_device")
_PYTEST_INTERNAL_ERROR = 3
_PYTEST_USAGE_ERROR = 4


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    `profiles` is None when every profile is to be claimed; where there are `requirements`, only
    their cases run.
    """

    spec: str
    areas: tuple[str, ...]
    devices: tuple[str, ...]
    profiles: tuple[str, ...] | None = None
    out: Path | None = None
    known_failures: Path | None = None
    mutant: str | None = None
    order: str = "listed"
    case_limit_s: float = CASE_LIMIT_S
    progress: bool = False
    requirements: frozenset[str] = frozenset()


class Run:
    """The state of one run; the plugin's hooks call its methods in this order."""

    def __init__(self, settings: Settings) -> None:
        """Read the registry and the announced failures; the adapter is not imported yet.

        Raises:
            ConformanceError: one of them cannot be used.
        """
        self.settings = settings
        self.subject = Subject(settings.spec, settings.mutant)
        self.registry: Mapping[str, Requirement] = load_registry()
        self.cases = Collected(self.registry)
        self.known = _known_failures.load(settings.known_failures)
        self.pool = shared_pool()
        self.report: dict[str, Any] | None = None
        self.tell: Callable[[Mapping[str, Any]], None] = _tell_nobody
        self._has_met = False
        self._progress = Progress(is_told=settings.progress)
        self._replaced: dict[str, None] = {}
        self._absent: set[str] = set()

    def meet(self, plugins: Any) -> None:
        """Remember what judges, and then import the adapter and its parts.

        Args:
            plugins: pytest's plugin manager, once every case is imported.
        Raises:
            ConformanceError: the adapter or a part cannot be used.
        """
        self._look = _tamper.guard(plugins)
        _isolation.admit()
        # First of all: autograd counts the devices there are when anything first runs backward.
        self._absent = {kind for kind in self.settings.devices if not _devices.is_there(kind)}
        with time_limit(self.settings.case_limit_s):
            self._implementation = self.subject.implementation
            self._claims = Claims(
                self._implementation,
                self.settings.areas,
                self.settings.devices,
                self.settings.profiles,
                unfit_torch(self._implementation),
            )
            refuse_unknown(self._claims, self.registry)
            self._adapter = _identity.adapter_file(self.settings.spec)
            if not self._claims.unfit:
                self._find_parts()
        self._has_met = True

    def _find_parts(self) -> None:
        """Import what was asked for, so that what is not there is known before any case."""
        parts = {
            area: _adapters.load_part(self._implementation, area)
            for area in self._claims.provided_areas() or self.settings.areas
        }
        if self.settings.mutant is None:  # a fault is to be seen by cases, whatever it is
            for entry in self.cases:
                area = entry.requirements[0].area
                if area in parts:
                    lacks = self._implementation.lacks.get(area, {})
                    ids = [requirement.id for requirement in entry.requirements]
                    entry.missing = why_missing(parts[area], entry.needs, lacks, ids)

    def selected(self, items: Iterable[pytest.Item]) -> None:
        """Start worker processes if a case that will run uses them."""
        if not self._has_met:  # pytest ends the collection of a refused run, too
            return
        items = list(items)
        running = [item for item in items if not self.reason_to_skip(item)]
        ids = {item.nodeid for item in running}
        chosen = [(item.nodeid, entry) for item in items if (entry := self.cases.find(item))]
        self._progress.begins((entry, id in ids) for id, entry in chosen)
        if any("ranks" in getattr(item, "fixturenames", ()) for item in running):
            self.pool.start(2)

    def reason_to_skip(self, item: pytest.Item) -> str:
        """Say why a case is not to run, or give an empty string; notes it as the outcome."""
        entry = self.cases.find(item)
        if entry is None:
            return ""
        if not any(map(self._claims.hold, entry.requirements)):
            entry.outcome = self._claims.lacks(entry.requirements[0])
            entry.reason = self._claims.why_not(entry.requirements[0])
        elif entry.missing:
            entry.outcome, entry.reason = "not_provided", entry.missing
        elif entry.device in self._absent:
            entry.outcome = "no_device"
            entry.reason = f"no device of kind {entry.device} on this machine"
        else:
            return ""
        return entry.reason

    @contextlib.contextmanager
    def same_start(self) -> Iterator[None]:
        """Seed torch, keep it to one thread, limit the time, show warnings to the case alone."""
        import torch

        torch.manual_seed(SEED)
        torch.set_num_threads(1)
        with warnings.catch_warnings(), time_limit(self.settings.case_limit_s):
            warnings.resetwarnings()
            warnings.simplefilter("always")
            yield
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()

    def phase_ended(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        """Take in setup, call or teardown of one case; may turn a foreign skip into a failure."""
        entry = self.cases[item]
        entry.duration_s += report.duration
        replaced = self._look() if report.when == "call" else []
        self._replaced.update(dict.fromkeys(replaced))
        if entry.outcome not in _NOT_ASKED:
            outcome = _take_in(entry, call, report, self._adapter)
            about = {"case": entry.case, "device": entry.device, "replaced": replaced}
            if outcome:
                self.tell({**about, "outcome": outcome})
        if report.when == "teardown":
            self._progress.ended(entry, ran=entry.outcome not in _NOT_ASKED)

    def finish(self, pytest_status: int) -> int:
        """Write the report, and give the exit code."""
        if pytest_status == _PYTEST_INTERNAL_ERROR:
            return _console.SUITE_BROKEN
        if pytest_status == _PYTEST_USAGE_ERROR:
            return _console.BAD_INPUT
        if not self._has_met:
            return _console.NOT_CONFORMANT
        rows, problems = _rows.announce(self._rows(), self.known)
        self.report = _report.build(
            suite={"name": _report.SUITE, "version": torchparts_conformance.__version__},
            implementation=_identity.describe_implementation(
                self._implementation, self.settings.spec
            ),
            environment=_identity.describe_environment(),
            claims=self._claims.to_json(),
            rows=rows,
            problems=[*problems, *self.cases.problems, *self._faults(), *self._interference()],
        )
        if self.settings.out is not None:
            _render.write_all(self.report, self.settings.out)
        if self.settings.requirements:
            passed = all(row["outcome"] == "pass" for row in self._asked_for())
            return _console.CONFORMANT if passed else _console.NOT_CONFORMANT
        return _report.exit_code(self.report)

    def _rows(self) -> list[dict[str, Any]]:
        entries = list(self.cases)
        asked = {"areas": self.settings.areas, "devices": self.settings.devices}
        lost = _rows.missing(entries, find_cases(), self.registry, **asked)
        return _rows.rows([*entries, *lost], lacks=self._claims.lacks)

    def _faults(self) -> list[str]:
        mutant = self.settings.mutant
        return [f"the implementation was broken by {mutant.rpartition('::')[2]}"] if mutant else []

    def _interference(self) -> list[str]:
        replaced = list(dict.fromkeys([*self._replaced, *self._look()]))
        return [f"{name} was replaced by the code under test" for name in replaced]

    def summary(self) -> list[str]:
        """Say in a few lines what the report says."""
        if self.report is None:
            return []
        if self.settings.requirements:
            return [
                f"{row['outcome']:<12} {row['case']} {row['device']}: "
                f"{_report.reason_of(row) or '-'}{_at(row['where'])}"
                for row in self._asked_for()
            ]
        page = self.settings.out / "matrix.html" if self.settings.out else None
        notes = _known_failures.notes(self.known)
        return _summary.summary(self.report, self.registry, page, notes)

    def _asked_for(self) -> list[dict[str, Any]]:
        rows = self.report["rows"] if self.report else []
        return [row for row in rows if row["id"] in self.settings.requirements]


def _take_in(
    entry: CaseResult,
    call: pytest.CallInfo[None],
    report: pytest.TestReport,
    adapter: Path | None,
) -> str:
    """Note and give what a phase decided; pytest is told that a foreign skip is a failure."""
    outcome, reason, where = _case_outcome.judge(call, report, adapter, entry.requirements[0].area)
    if outcome == "error" and not report.failed:
        report.outcome = "failed"
        report.longrepr = reason
        vars(report).pop("wasxfail", None)
    if outcome and entry.outcome in ("not_run", "pass"):
        entry.outcome, entry.reason, entry.where = outcome, reason, where
    return outcome


def _at(where: str) -> str:
    return f" (at {where})" if where else ""


def _tell_nobody(_: Mapping[str, Any]) -> None:
    """Tell nothing: pytest was started by hand, and nobody judges from another process."""
