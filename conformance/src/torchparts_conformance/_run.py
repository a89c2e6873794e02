"""One run of the suite inside pytest: the selected cases, their outcomes, and the report."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torchparts_conformance import (
    _adapters,
    _badge,
    _devices,
    _errors,
    _known_failures,
    _report,
    _summary,
)
from torchparts_conformance._claims import Claims, check_capabilities, unfit_torch, why_missing
from torchparts_conformance._collected import CaseResult, Collected, claimed
from torchparts_conformance._errors import one_line
from torchparts_conformance._failure import sentence
from torchparts_conformance._subject import Subject, call_case_function, freeze_imports
from torchparts_conformance._time_limit import time_limit
from torchparts_conformance._worker import place_of
from torchparts_conformance.ranks import Ranks
from torchparts_conformance.requirements._areas import area_of_path
from torchparts_conformance.requirements._cases import load_registry
from torchparts_conformance.requirements._requirement import Requirement

CASE_LIMIT_S = 300.0
# Ranks time out before their case does, so that the case can name the late one.
_RANKS_SHARE = 0.75
_NOT_ASKED = ("not_claimed", "not_provided", "no_device")
_PYTEST_INTERNAL_ERROR = 3
_PYTEST_USAGE_ERROR = 4


@functools.cache
def shared_ranks(*modules: str) -> Ranks:
    """Return what starts ranks; it ends with this process."""
    ranks = Ranks(*modules)
    atexit.register(ranks.close)
    return ranks


@dataclass(frozen=True)
class Settings:
    """The options of a run.

    Attributes:
        profiles: the chosen profiles; None for core and those that the implementation claims.
        requirements: only their cases run, if there are any.
        share: `folder/N`: other processes run the other cases.
    """

    spec: str
    areas: tuple[str, ...]
    devices: tuple[str, ...]
    profiles: tuple[str, ...] | None = None
    out: Path | None = None
    known_failures: Path | None = None
    mutant: str | None = None
    case_limit_s: float = CASE_LIMIT_S
    requirements: frozenset[str] = frozenset()
    share: Path | None = None


class Run:
    """The state of one run; the plugin's hooks call its methods in this order."""

    def __init__(self, settings: Settings) -> None:
        """Read the requirements and the known failures; the adapter is imported later."""
        self.settings = settings
        self.subject = Subject(settings.spec, settings.mutant)
        self.registry: Mapping[str, Requirement] = load_registry()
        self.cases = Collected(self.registry)
        self.known = _known_failures.load(settings.known_failures)
        self.compared: tuple[str, str, str, str] | None = None
        self.report: dict[str, Any] | None = None
        self._is_ready = False

    def import_adapter(self) -> None:
        """Import the adapter and its parts, after all cases were collected."""
        # Before the adapter: autograd counts the devices at the first backward of the process.
        self._absent = {kind for kind in self.settings.devices if not _devices.is_there(kind)}
        with time_limit(self.settings.case_limit_s):
            self._implementation = self.subject.implementation
            unfit = unfit_torch(self._implementation)
            self._claims = Claims(self._implementation, self.settings.profiles, unfit)
            check_capabilities(self._implementation, self.registry)
            self._adapter = _adapters.adapter_file(self.settings.spec)
            if not unfit:
                self._find_parts()
        self._is_ready = True

    def _find_parts(self) -> None:
        """Import the chosen parts, and find missing names before any case runs."""
        provided = [a for a in self.settings.areas if self._implementation.provides(a)]
        parts = {
            area: _adapters.load_part(self._implementation, area)
            for area in provided or self.settings.areas
        }
        if self.settings.mutant is None:  # a fault may remove a name, and the cases must notice
            for entry in self.cases:
                if entry.area in parts:
                    lacks = self._implementation.lacks.get(entry.area, {})
                    ids = [requirement.id for requirement in entry.requirements]
                    entry.missing = why_missing(parts[entry.area], entry.needs, lacks, ids)

    def wanted(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """Return the cases that are to run."""
        wanted = self.settings.requirements
        kept = []
        for item in items:
            entry = self.cases.find(item)
            if entry is None and area_of_path(item.path):
                continue
            is_wanted = entry is not None and any(r.id in wanted for r in entry.requirements)
            if is_wanted or not wanted:
                kept.append(item)
        return kept

    def selected(self, items: Iterable[pytest.Item]) -> None:
        """Start worker processes if a case uses them: they import torch while other cases run."""
        if not self._is_ready:  # pytest also calls this for a refused run
            return
        items = list(items)
        freeze_imports()
        is_first = self.settings.share is None or self.settings.share.name == "0"
        uses_ranks = (e for i in items if (e := self.cases.find(i)) and e.uses_ranks)
        if is_first and any(not self._why_not(entry)[0] for entry in uses_ranks):
            shared_ranks(*self.subject.modules()).start()

    def on_ranks(
        self, area: str, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float
    ) -> list[Any]:
        """Call `function(part, rank, world_size, *args)` on each rank; return results by rank."""
        subject = self.subject.spec, self.subject.mutant
        given = (subject, area, place_of(function), *args)
        limit_s = min(timeout_s, _RANKS_SHARE * self.settings.case_limit_s)
        ranks = shared_ranks(*self.subject.modules())
        return ranks(world_size, call_case_function, *given, timeout_s=limit_s)

    def claimed(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Return the items that this process runs, if other processes run the rest."""
        assert self.settings.share is not None
        found = {item.nodeid: self.cases.find(item) for item in items}
        uses_ranks = {id: entry is not None and entry.uses_ranks for id, entry in found.items()}
        return claimed(items, self.settings.share, uses_ranks)

    def _why_not(self, entry: CaseResult) -> tuple[str, str]:
        """Return outcome and reason if a case is not to run, or empty strings."""
        lacks = [self._claims.why_not(requirement) for requirement in entry.requirements]
        if all(outcome for outcome, _ in lacks):
            return lacks[0]
        if entry.missing:
            return "not_provided", entry.missing
        if entry.device in self._absent:
            return "no_device", f"no device of kind {entry.device} on this machine"
        return "", ""

    def reason_to_skip(self, item: pytest.Item) -> str:
        """Return why a case is not to run, or "", and record it as the outcome."""
        entry = self.cases.find(item)
        if entry is None:
            return ""
        outcome, reason = self._why_not(entry)
        if outcome:
            entry.outcome, entry.reason = outcome, reason
        return reason

    @contextlib.contextmanager
    def same_start(self) -> Iterator[None]:
        """Seed torch, use one thread, limit the time, and show all warnings."""
        import torch

        self.compared = None
        torch.manual_seed(0)
        torch.set_num_threads(1)
        with warnings.catch_warnings(), time_limit(self.settings.case_limit_s):
            warnings.resetwarnings()
            warnings.simplefilter("always")
            yield
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        freeze_imports()

    def phase_ended(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        """Record setup, call or teardown of one case. A skip by the case itself is an error."""
        entry = self.cases.find(item)
        assert entry is not None
        entry.duration_s += report.duration
        if entry.outcome not in _NOT_ASKED:
            outcome, reason = self._outcome(call, report)
            if outcome == "error" and not report.failed:
                report.outcome, report.longrepr = "failed", reason
                vars(report).pop("wasxfail", None)
            if outcome and entry.outcome in ("not_run", "pass"):
                entry.outcome, entry.reason = outcome, reason
                entry.where = _where(call.excinfo.value, self._adapter) if call.excinfo else ""

    def _outcome(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> tuple[str, str]:
        """Return outcome and reason of one phase; no outcome if the phase does not determine it."""
        raised = call.excinfo.value if call.excinfo else None
        if report.skipped or hasattr(report, "wasxfail"):
            said = one_line(raised) if raised else "a mark on the case"
            return "error", f"only the suite may skip, but {report.when} did: {said}"
        if not report.failed:
            return ("pass", "") if report.when == "call" else ("", "")
        raised = raised or AssertionError("failed")
        failed = isinstance(raised, (AssertionError, pytest.fail.Exception))
        word = "fail" if failed and report.when == "call" else "error"
        return word, sentence(raised, self.compared)

    def finish(self, pytest_status: int) -> int:
        """Write the report, and return the exit code."""
        if pytest_status == _PYTEST_INTERNAL_ERROR:
            return _errors.SUITE_BROKEN
        if pytest_status == _PYTEST_USAGE_ERROR:
            return _errors.BAD_INPUT
        if not self._is_ready:
            return _errors.NOT_CONFORMANT
        rows, problems = self._rows(), [*self.cases.problems, *self._faults()]
        rows, untrue = _known_failures.announce(rows, self.known)
        problems += untrue
        who = self._implementation
        self.report = _report.build(
            implementation={
                "name": _errors.printable(who.name),
                "version": _errors.printable(who.version),
                "adapter": self.settings.spec,
                "distributions": {n: _adapters.version_of(n) for n in who.distributions},
            },
            environment=_devices.environment(),
            claims={
                "areas": list(self.settings.areas),
                "devices": list(self.settings.devices),
                "profiles": None if self.settings.profiles is None else [*self.settings.profiles],
                "capabilities": {area: sorted(c) for area, c in who.capabilities.items()},
            },
            rows=rows,
            problems=problems,
        )
        if self.settings.out is not None:
            write_all(self.report, self.settings.out, self.summary())
        return exit_code(self.report, self.settings.requirements)

    def _rows(self) -> list[dict[str, Any]]:
        lost = self.cases.not_collected(self.settings.areas, self.settings.devices)
        return [
            entry.row(requirement, self._claims.why_not(requirement))
            for entry in (*self.cases, *lost)
            for requirement in entry.requirements
        ]

    def _faults(self) -> Iterator[str]:
        if self.settings.mutant:
            yield f"the implementation was broken by {self.settings.mutant.rpartition('::')[2]}"

    def summary(self) -> list[str]:
        """Return the lines that a terminal shows about the report."""
        if self.report is None:
            return []
        if not self.settings.requirements:
            return _summary.summary(self.report, self.registry)
        return [
            f"{row['outcome']:<12} {row['case']} {row['device']}: {row['reason'] or '-'}"
            + (f" (at {row['where']})" if row["where"] else "")
            for row in self.report["rows"]
            if row["id"] in self.settings.requirements
        ]


def exit_code(report: Mapping[str, Any], requirements: Collection[str]) -> int:
    """Return the exit code of a run, which may be of some requirements only."""
    if not requirements:
        return _report.exit_code(report)
    outcomes = {row["outcome"] for row in report["rows"] if row["id"] in requirements}
    return _errors.CONFORMANT if outcomes == {"pass"} else _errors.NOT_CONFORMANT


def write_all(report: Mapping[str, Any], folder: Path, summary: Iterable[str]) -> None:
    """Write badges and summary of a report, and the report last."""
    for badge in _badge.badges(report):
        _report.write(folder / f"badge-{badge.area}.svg", _badge.to_svg(badge))
    _report.write(folder / "summary.txt", "\n".join(map(_errors.printable, summary)) + "\n")
    _report.write(folder / "report.json", _report.to_text(report))


def _where(raised: BaseException, adapter: Path | None) -> str:
    """Return the last line of the case, of the adapter, and of the code that raised."""
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(raised.__traceback__)]
    in_case = [frame for frame in frames if area_of_path(frame[0])]
    in_adapter = [frame for frame in frames if frame[0] == adapter]
    last = [] if isinstance(raised, (AssertionError, pytest.fail.Exception)) else frames[-1:]
    steps = dict.fromkeys([*in_case[-1:], *in_adapter[-1:], *last]) if in_case else {}
    return " > ".join(f"{path.parent.name}/{path.name}:{line}" for path, line in steps)
