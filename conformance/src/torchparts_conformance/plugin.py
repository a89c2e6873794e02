"""The pytest plugin: options, fixtures, outcomes, and the report.

It does nothing unless an implementation is named with `--impl` or in the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from torchparts_conformance import _options
from torchparts_conformance._adapters import VARIABLE
from torchparts_conformance._errors import BAD_INPUT, ConformanceError, printable
from torchparts_conformance._failure import difference, text_of
from torchparts_conformance._run import Run
from torchparts_conformance.requirements._areas import area_of_path

RANK_TIMEOUT_S = 90.0
_RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; the command line of the suite has the same names."""
    group = parser.getgroup("torchparts-conformance")
    own = (_options.KNOWN_FAILURES, _options.OUT, *_options.PYTEST_ONLY)
    for option in (*_options.OPTIONS, *own):
        option.add_to(group.addoption)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and the requirements; an error in them ends pytest with one line."""
    config.addinivalue_line("markers", "requirement(id): the requirement a case checks")
    spec = config.getoption("impl") or os.environ.get(VARIABLE)
    if spec:
        try:
            config.stash[_RUN] = Run(_options.settings(config.getoption, spec))
        except ConformanceError as error:
            _refuse(error)


def _refuse(error: ConformanceError) -> NoReturn:
    """End pytest with an error message on a separate line."""
    sys.stderr.write("\n")
    raise pytest.UsageError(str(error)) from None


def run_of(config: pytest.Config) -> Run | None:
    """Return the run of a session, if an implementation was named."""
    return config.stash.get(_RUN, None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out cases of areas that were not chosen."""
    run = run_of(config)
    area = area_of_path(collection_path)
    return True if run is not None and area and area not in run.settings.areas else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item of each case for each device."""
    run = run_of(metafunc.config)
    if run is not None and area_of_path(metafunc.definition.path):
        metafunc.fixturenames.append("device")
        metafunc.parametrize("device", run.settings.devices, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Record why a file of cases cannot be imported."""
    report = yield
    run = run_of(collector.config)
    if run is not None and report.failed and area_of_path(collector.path):
        run.cases.note_import_error(collector.path, report.longreprtext)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Record every case before options remove some, and then import the adapter."""
    cases = [item for item in items if area_of_path(item.path)]
    run = run_of(config)
    if cases and run is None:
        raise pytest.UsageError(f"no implementation was named. Add --impl NAME or set {VARIABLE}.")
    if run is not None:
        try:
            run.cases.take(cases)
            run.import_adapter()
            items[:] = run.wanted(items)
        except ConformanceError as error:
            _refuse(error)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start worker processes early."""
    run = run_of(session.config)
    if run is not None and not session.config.option.collectonly:
        run.selected(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the cases that no other process has claimed, if there are other processes."""
    run = run_of(session.config)
    if run is None or run.settings.share is None or session.testsfailed:
        return None
    items = run.claimed(session.items)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip requirements that the implementation does not claim or provide; cases may not skip."""
    run = run_of(item.config)
    if run is not None and (reason := run.reason_to_skip(item)):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run each case from the same random state and warning filters."""
    run = run_of(item.config)
    if run is None or not area_of_path(item.path):
        return (yield)
    with run.same_start():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the outcome of each phase of a case."""
    report = yield
    run = run_of(item.config)
    if run is not None and area_of_path(item.path):
        run.phase_ended(item, call, report)
    return report


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> None:
    """Keep the values of a comparison that failed; pytest explains it as usual."""
    if (run := run_of(config)) is not None:
        run.compared = op, text_of(left), text_of(right), difference(op, left, right)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the report, and set the exit code."""
    run = run_of(session.config)
    if run is not None and not session.config.option.collectonly:
        try:
            session.exitstatus = run.finish(int(exitstatus))
        except ConformanceError as error:
            sys.stderr.write(printable(str(error)) + "\n")
            session.exitstatus = BAD_INPUT


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the verdict below pytest's own summary."""
    run = run_of(config)
    if run is not None and run.report is not None:
        terminalreporter.section("conformance")
        for line in run.summary():
            terminalreporter.write_line(printable(line))


@pytest.fixture
def part(request: pytest.FixtureRequest) -> Any:
    """Return the part under test of the case's area."""
    run, area = _run_and_area(request)
    return run.subject.part(area)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return `ranks(world_size, function, *args)`, which runs a function in each gloo process."""
    run, area = _run_and_area(request)

    def run_on_ranks(
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = RANK_TIMEOUT_S,
    ) -> list[Any]:
        """Call `function(part, rank, world_size, *args)` on each rank; return results by rank."""
        __tracebackhide__ = True
        return run.on_ranks(area, world_size, function, *args, timeout_s=timeout_s)

    return run_on_ranks


def _run_and_area(request: pytest.FixtureRequest) -> tuple[Run, str]:
    run = run_of(request.config)
    area = area_of_path(request.path)
    if run is None or area is None:
        raise pytest.UsageError("this fixture belongs to the cases of torchparts-conformance")
    return run, area
