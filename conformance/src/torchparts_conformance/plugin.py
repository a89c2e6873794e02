"""The pytest plugin: options, fixtures, the rule on skipping, and the report.

Nothing here does anything unless an implementation is named with `--impl` or in the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from torchparts_conformance import _console
from torchparts_conformance._errors import ConformanceError, OptionError
from torchparts_conformance.requirements._areas import ACCELERATOR, AREAS, is_device
from torchparts_conformance.requirements._cases import load_registry
from torchparts_conformance.run import _options
from torchparts_conformance.run._case_result import area_of_path, is_case_path
from torchparts_conformance.run._order import known_order
from torchparts_conformance.run._run import Run, Settings
from torchparts_conformance.subject import _adapters
from torchparts_conformance.subject._claims import refuse_unknown_profiles
from torchparts_conformance.subject._devices import accelerator, is_known

RANK_TIMEOUT_S = 90.0
MAX_CASE_LIMIT_S = 86400.0
# Ranks are given up before the case that waits for them, so that the case can say which was late.
_RANKS_SHARE = 0.75
_RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; each has the same name on the command line of the suite."""
    group = parser.getgroup("torchparts-conformance")
    for option in (*_options.OPTIONS, _options.OUT):
        option.add_to(group.addoption)
    group.addoption("--mutant", default=None, help="file.py::name of a fault to put in")
    group.addoption(
        "--requirement", default=None, help="run the cases of these only; commas between"
    )
    group.addoption("--progress", action="store_true", help="print one line as cases end")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and the requirements, so that bad ones end with one line."""
    config.addinivalue_line("markers", "requirement(id): the requirement a case checks")
    spec = config.getoption("impl") or os.environ.get(_adapters.VARIABLE)
    try:  # also without an implementation: that one is missing hides no mistake in the others
        settings = _settings(config, spec or "")
        if spec:
            config.stash[_RUN] = Run(settings)
    except ConformanceError as error:
        _refuse(error)


def _refuse(error: ConformanceError) -> NoReturn:
    """End pytest with one line that says why, apart from whatever was printed before."""
    sys.stderr.write("\n")
    raise pytest.UsageError(str(error)) from None


def _settings(config: pytest.Config, spec: str) -> Settings:
    option = config.getoption
    checked = _each_of(
        areas=lambda: _listed(option("area"), AREAS, "--area"),
        devices=lambda: _devices_of(option("device")),
        profiles=lambda: _profiles(option("profile")),
        order=lambda: known_order(option("order")),
        case_limit_s=lambda: _limit(option("case_limit")),
    )
    return Settings(
        spec=spec,
        out=option("out"),
        known_failures=option("known_failures"),
        mutant=option("mutant"),
        progress=option("progress"),
        requirements=frozenset((option("requirement") or "").split(",")) - {""},
        **checked,
    )


def _each_of(**checks: Callable[[], Any]) -> dict[str, Any]:
    """Give what each returns, after all were asked: a wrong option hides no other one.

    Raises:
        OptionError: at least one raised; all that was said.
    """
    found, wrong = {}, []
    for name, check in checks.items():
        try:
            found[name] = check()
        except OptionError as error:
            wrong.append(str(error))
    if wrong:
        raise OptionError(" ".join(wrong))
    return found


def _profiles(text: str) -> tuple[str, ...] | None:
    if text == "all":
        return None
    chosen = tuple(text.split(","))
    refuse_unknown_profiles(chosen, load_registry())
    return chosen


def _limit(seconds: float) -> float:
    if not 0 < seconds <= MAX_CASE_LIMIT_S:
        raise OptionError(
            f"--case-limit {seconds:g} asked for, but more than 0 and at most "
            f"{MAX_CASE_LIMIT_S:g} seconds are possible. Give another."
        )
    return seconds


def _listed(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Split `a,b`, in the order of `allowed`; `all` is every one."""
    wanted = set(allowed) if text == "all" else set(text.split(","))
    if unknown := sorted(wanted - set(allowed)):
        raise OptionError(
            f"{option} {_named(unknown)} is unknown, but these are known: {', '.join(allowed)}."
        )
    return tuple(word for word in allowed if word in wanted)


def _named(words: Iterable[str]) -> str:
    return ", ".join(f"{word!r:.60}" for word in words)


def _devices_of(text: str) -> tuple[str, ...]:
    """Split `cpu,cuda`, the CPU first; `all` is the CPU and the machine's accelerator."""
    here = accelerator() or ACCELERATOR
    wanted = {"cpu", here} if text == "all" else set(text.split(","))
    wanted = {here if word == ACCELERATOR else word for word in wanted}
    if unknown := sorted(w for w in wanted if w != here and not (is_device(w) and is_known(w))):
        raise OptionError(
            f"--device {_named(unknown)} is unknown, but cpu and the kinds that torch knows are "
            "there to choose from, such as cuda. Give the kind without an index."
        )
    return tuple(sorted(wanted, key=lambda kind: (kind != "cpu", kind)))


def run_of(config: pytest.Config) -> Run | None:
    """Give the run of a session, if an implementation was named."""
    return config.stash.get(_RUN, None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the cases of areas that were not asked for."""
    run = run_of(config)
    area = area_of_path(collection_path)
    return True if run is not None and area and area not in run.settings.areas else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item of each case for each device."""
    run = run_of(metafunc.config)
    if run is not None and is_case_path(metafunc.definition.path):
        metafunc.fixturenames.append("device")
        metafunc.parametrize("device", run.settings.devices, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Note why a file of cases cannot be imported: no case runs then, and the end has to say it."""
    report = yield
    run = run_of(collector.config)
    if run is not None and report.failed and is_case_path(collector.path):
        run.cases.broken(collector.path, report.longreprtext)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note every case before any option can take one away, and only then import the adapter."""
    cases = [item for item in items if is_case_path(item.path)]
    run = run_of(config)
    if cases and run is None:
        raise pytest.UsageError(
            "no implementation given, but one is needed. "
            f"Add --impl NAME or set {_adapters.VARIABLE}."
        )
    if run is not None:
        try:
            run.cases.take(cases)
            items[:] = run.cases.arranged(
                items, order=run.settings.order, requirements=run.settings.requirements
            )
            run.meet(config.pluginmanager)
        except ConformanceError as error:
            _refuse(error)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the worker processes early: they import torch while other cases run."""
    run = run_of(session.config)
    if run is not None and not session.config.option.collectonly:
        run.selected(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the implementation does not claim and what has no device; nobody else may."""
    run = run_of(item.config)
    if run is not None and (reason := run.reason_to_skip(item)):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a case from the same random state and warning filters, whoever runs it."""
    run = run_of(item.config)
    if run is None or not is_case_path(item.path):
        return (yield)
    with run.same_start():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn what happened into one of the nine outcomes."""
    report = yield
    run = run_of(item.config)
    if run is not None and is_case_path(item.path):
        run.phase_ended(item, call, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the report, and end with the suite's own exit code."""
    run = run_of(session.config)
    if run is not None and not session.config.option.collectonly:
        try:
            session.exitstatus = run.finish(int(exitstatus))
        except ConformanceError as error:
            sys.stderr.write(_console.shown(f"{error}") + "\n")
            session.exitstatus = _console.BAD_INPUT


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the verdict below pytest's own summary."""
    run = run_of(config)
    if run is not None and run.report is not None:
        terminalreporter.section("conformance")
        for line in run.summary():
            terminalreporter.write_line(_console.shown(line))


@pytest.fixture
def part(request: pytest.FixtureRequest) -> Any:
    """Give the part under test, for the area whose folder the case is in."""
    run, area = _run_and_area(request)
    return run.subject.part(area)


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Any:
    """Give all four parts: `parts.ckpt_wrap`, `.mod_tracker`, `.flat_param`, `.sac_policies`."""
    run, _ = _run_and_area(request)
    return run.subject.part("combined")


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Give `ranks(world_size, function, *args)`, which runs the function in each gloo process."""
    run, area = _run_and_area(request)

    def run_on_ranks(
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = RANK_TIMEOUT_S,
    ) -> list[Any]:
        """Call `function(part, rank, world_size, *args)` on each rank; give results by rank."""
        __tracebackhide__ = True
        limit_s = min(timeout_s, _RANKS_SHARE * run.settings.case_limit_s)
        return run.pool.run(run.subject, area, world_size, function, args, timeout_s=limit_s)

    return run_on_ranks


def _run_and_area(request: pytest.FixtureRequest) -> tuple[Run, str]:
    run = run_of(request.config)
    area = area_of_path(request.path)
    if run is None or area is None:
        raise pytest.UsageError("this fixture belongs to the cases of torchparts-conformance")
    return run, area
