"""Edge: one run of the suite inside pytest: what has to run, what happened, and the report."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import torchparts_conformance
from torchparts_conformance import _identity, _known, _manifest, _render, _report
from torchparts_conformance._adapters import one_line
from torchparts_conformance._errors import RegistryError
from torchparts_conformance._manifest import Row
from torchparts_conformance._outcomes import ANNOUNCED
from torchparts_conformance._ranks import shared_pool
from torchparts_conformance._registry import (
    AREAS,
    Requirement,
    area_of,
    folder_of,
    load_registry,
)
from torchparts_conformance._subject import Subject

SEED = 0
EXIT_CONFORMANT = 0
EXIT_NOT_CONFORMANT = 1
EXIT_NO_DEVICE = 3
EXIT_BAD_INPUT = 4
EXIT_SUITE_BROKEN = 5
_FOLDERS = {folder_of(area) for area in AREAS}
_PYTEST_INTERNAL_ERROR = 3
_PYTEST_USAGE_ERROR = 4


@dataclass(frozen=True)
class Settings:
    """What was asked for; `profiles` is None when every profile is to be claimed."""

    spec: str
    areas: tuple[str, ...]
    devices: tuple[str, ...]
    profiles: tuple[str, ...] | None = None
    out: Path | None = None
    known_failures: Path | None = None
    mutant: str | None = None
    progress: bool = False


@dataclass
class _Item:
    """One case on one device: its rows, and the outcome so far."""

    case: str
    device: str
    requirements: tuple[Requirement, ...]
    outcome: str = "not_run"
    reason: str = ""
    duration_s: float = 0.0


def area_of_path(path: Path) -> str | None:
    """Give the area a file's cases belong to: the folder below `cases`."""
    parts = path.parts
    for above, folder in itertools.pairwise(parts):
        if above == "cases" and folder in _FOLDERS:
            return area_of(folder)
    return None


def is_case_path(path: Path) -> bool:
    """Say whether a file is one of the suite's cases."""
    return area_of_path(path) is not None


class Run:
    """The state of one run; the plugin's hooks call its methods in this order."""

    def __init__(self, settings: Settings) -> None:
        """Import the adapter, read the registry and the announced failures.

        Raises:
            ConformanceError: one of them cannot be used.
        """
        self.settings = settings
        self.subject = Subject(settings.spec, settings.mutant)
        self.registry = load_registry()
        self.known = _known.load(settings.known_failures)
        self.manifest = _manifest.load_manifest()
        self.pool = shared_pool()
        self.report: dict[str, Any] | None = None
        self._items: dict[str, _Item] = {}
        self._interrupted = False
        self._done = 0
        self._implementation = self.subject.implementation

    def collected(self, cases: Iterable[pytest.Item]) -> None:
        """Take every case before selection.

        Raises:
            RegistryError: a case names a requirement that does not exist.
        """
        for item in cases:
            requirements = self._requirements(item)
            device = _device(item)
            wanted = tuple(r for r in requirements if device in r.devices)
            if wanted:
                self._items[item.nodeid] = _Item(_case_name(item), device, wanted)

    def _requirements(self, item: pytest.Item) -> list[Requirement]:
        ids = [id for mark in item.iter_markers("requirement") for id in mark.args]
        unknown = [id for id in ids if id not in self.registry]
        if unknown or not ids:
            raise RegistryError(
                f"case {_case_name(item)} names {unknown or 'no requirement'}, but a case names "
                "ids of its area's spec file. Add the entry, or mend the id."
            )
        return [self.registry[id] for id in dict.fromkeys(ids)]

    def is_foreign(self, item: pytest.Item) -> bool:
        """Say whether a case has nothing to check on its device."""
        return is_case_path(item.path) and item.nodeid not in self._items

    def freeze(self, path: Path) -> None:
        """Write the list of cases that were collected."""
        rows = {Row(r.id, entry.case) for entry in self._items.values() for r in entry.requirements}
        _manifest.freeze(rows, path=path)

    def selected(self, items: Iterable[pytest.Item]) -> None:
        """Start worker processes if a case that will run uses them."""
        running = [item for item in items if not self.reason_to_skip(item)]
        if any("ranks" in getattr(item, "fixturenames", ()) for item in running):
            self.pool.start(2)

    def reason_to_skip(self, item: pytest.Item) -> str:
        """Say why a case is not to run, or give an empty string; notes it as the outcome."""
        entry = self._items.get(item.nodeid)
        if entry is None:
            return ""
        if not any(self._claims(requirement) for requirement in entry.requirements):
            entry.outcome = "not_claimed"
        elif entry.device == "cuda" and not _has_cuda():
            entry.outcome = "no_device"
        else:
            return ""
        entry.reason = self._why_not(entry)
        return entry.reason

    def _why_not(self, entry: _Item) -> str:
        area, profile = entry.requirements[0].area, entry.requirements[0].profile
        if entry.outcome == "no_device":
            return "no CUDA device on this machine"
        if not self._implementation.provides(area):
            return f"{area} is not provided"
        return f"profile {profile} is not claimed"

    def _claims(self, requirement: Requirement) -> bool:
        chosen = self.settings.profiles
        return (chosen is None or requirement.profile in chosen) and self._implementation.claims(
            requirement.area, requirement.profile
        )

    @contextlib.contextmanager
    def same_start(self) -> Iterator[None]:
        """Seed torch, keep it to one thread, and show every warning to the case alone."""
        import torch

        torch.manual_seed(SEED)
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.simplefilter("always")
            yield
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()

    def phase_ended(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        """Take in setup, call or teardown of one case; may turn a foreign skip into a failure."""
        entry = self._items[item.nodeid]
        entry.duration_s += report.duration
        if entry.outcome in ("not_claimed", "no_device"):
            if report.when == "teardown":
                self._progress(entry)
            return
        outcome, reason = _judge(call, report)
        if outcome == "error" and not report.failed:
            report.outcome = "failed"
            report.longrepr = reason
            vars(report).pop("wasxfail", None)
        if outcome and entry.outcome in ("not_run", "pass"):
            entry.outcome, entry.reason = outcome, reason
        if report.when == "teardown":
            self._progress(entry)

    def _progress(self, entry: _Item) -> None:
        self._done += 1
        if not self.settings.progress:
            return
        bad = entry.outcome in ("fail", "error")
        ids = ",".join(requirement.id for requirement in entry.requirements)
        line = f"[{self._done:>4}/{len(self._items)}] {ids} {entry.device} {entry.outcome}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line:.100}" + ("\n" if bad else ""))
        elif bad or self._done % 20 == 0 or self._done == len(self._items):
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def finish(self, pytest_status: int) -> int:
        """Write the report, and give the exit code."""
        if pytest_status in (_PYTEST_INTERNAL_ERROR, _PYTEST_USAGE_ERROR):
            return EXIT_SUITE_BROKEN if pytest_status == _PYTEST_INTERNAL_ERROR else EXIT_BAD_INPUT
        rows, problems = self._announce(self._rows())
        self.report = _report.build(
            suite=self._suite(rows),
            implementation=_identity.describe_implementation(
                self._implementation, self.settings.spec
            ),
            environment=_identity.describe_environment(),
            claims=self._claimed(),
            rows=rows,
            problems=problems,
        )
        if self.settings.out is not None:
            _render.write_all(self.report, self.settings.out)
        return _report.exit_code(self.report)

    def _suite(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Say which suite this is, and whether it is the one that was published."""
        frozen = self.manifest
        listed = {Row(row["id"], row["case"]) for row in rows}
        return {
            "name": _report.SUITE,
            "version": torchparts_conformance.__version__,
            "manifest_sha256": frozen.sha256 if frozen else None,
            "frozen": frozen is not None
            and self.settings.mutant is None
            and frozen.files == _manifest.file_fingerprints()
            and listed <= set(frozen.rows),
        }

    def _claimed(self) -> dict[str, Any]:
        capabilities = self._implementation.capabilities
        return {
            "areas": list(self.settings.areas),
            "devices": list(self.settings.devices),
            "profiles": None if self.settings.profiles is None else list(self.settings.profiles),
            "capabilities": {area: sorted(found) for area, found in sorted(capabilities.items())},
        }

    def _rows(self) -> list[dict[str, Any]]:
        """Give a row for each requirement of each case, those that did not run included."""
        rows = {
            (requirement.id, entry.case, entry.device): self._row(requirement, entry)
            for entry in self._items.values()
            for requirement in entry.requirements
        }
        for row in self.manifest.rows if self.manifest else ():
            self._add_missing(rows, row)
        return [rows[key] for key in sorted(rows)]

    def _add_missing(self, rows: dict[Any, dict[str, Any]], row: Row) -> None:
        requirement = self.registry.get(row.id)
        if requirement is None or requirement.area not in self.settings.areas:
            return
        for device in self.settings.devices:
            if device in requirement.devices and (row.id, row.case, device) not in rows:
                missing = _Item(row.case, device, (requirement,), reason="was not collected")
                rows[row.id, row.case, device] = self._row(requirement, missing)

    def _row(self, requirement: Requirement, entry: _Item) -> dict[str, Any]:
        claimed = self._claims(requirement)
        return {
            "id": requirement.id,
            "case": entry.case,
            "device": entry.device,
            "area": requirement.area,
            "level": requirement.level,
            "profile": requirement.profile,
            "outcome": entry.outcome if claimed else "not_claimed",
            "reason": entry.reason[: _report.MAX_REASON],
            "duration_s": round(entry.duration_s, 3),
        }

    def _announce(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Turn announced failures into xfail, unannounced luck into xpass."""
        problems = _known.problems(self.known, rows)
        announced = {(entry.id, device) for entry in self.known for device in entry.devices}
        for row in rows:
            if (row["id"], row["device"]) in announced:
                row["outcome"] = ANNOUNCED.get(row["outcome"], row["outcome"])
        return rows, problems

    def summary(self) -> str:
        """Say in a few lines what the report says."""
        return "" if self.report is None else _report.summary(self.report)


def _device(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "cpu" if callspec is None else str(callspec.params.get("device", "cpu"))


def _case_name(item: pytest.Item) -> str:
    """Name a case by area folder, file, function and parameters, the device left out."""
    device = _device(item)
    path = Path(item.path)
    folder = next(part for part in reversed(path.parts[:-1]) if part in _FOLDERS)
    _, bracket, parameters = item.name.partition("[")
    words = [word for word in parameters.rstrip("]").split("-") if word != device]
    inside = f"[{'-'.join(words)}]" if bracket and words else ""
    return f"{folder}/{path.name}::{item.name.partition('[')[0]}{inside}"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _judge(call: pytest.CallInfo[None], report: pytest.TestReport) -> tuple[str, str]:
    """Give the outcome of one phase and why; an empty outcome where the phase decides nothing."""
    if report.skipped or hasattr(report, "wasxfail"):
        said = one_line(call.excinfo.value) if call.excinfo else "a mark on the case"
        return "error", f"only the suite may skip, but {report.when} did: {said}"
    if report.failed:
        raised = call.excinfo.value if call.excinfo else AssertionError("failed")
        failed = isinstance(raised, (AssertionError, pytest.fail.Exception))
        return ("fail" if failed and report.when == "call" else "error"), _plain(raised)
    return ("pass", "") if report.when == "call" else ("", "")


def _plain(raised: BaseException) -> str:
    """Give a reason without what differs from run to run: addresses, and folders of files."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x...", one_line(raised))
    return re.sub(r"(?<![\w:/])(?:/[\w.+@-]+)+/", "", text)
