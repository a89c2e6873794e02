"""The command line. Bad input is one line on standard error, and exit code 4."""

from __future__ import annotations

import argparse
import difflib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchparts_conformance import (
    _adapters,
    _known_failures,
    _mutation,
    _options,
    _report,
    _results,
    _run,
    _summary,
    _verify,
)
from torchparts_conformance._claims import Claims, check_capabilities, unfit_torch, why_missing
from torchparts_conformance._errors import (
    BAD_INPUT,
    CONFORMANT,
    NOT_CONFORMANT,
    SUITE_BROKEN,
    ConformanceError,
    OptionError,
    ReportError,
    fail,
    say,
)
from torchparts_conformance._process import RunError, run_cases
from torchparts_conformance._worker import environment
from torchparts_conformance.requirements._areas import AREAS, CORE, profile_order
from torchparts_conformance.requirements._cases import (
    CASES,
    cases_by_id,
    find_cases,
    load_registry,
    trace,
)
from torchparts_conformance.requirements._needs import needs_of
from torchparts_conformance.requirements._requirement import Requirement

NAME = "torchparts-conformance"
_Registry = Mapping[str, Requirement]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ConformanceError as error:
        return fail([f"{NAME}: {error}"], BAD_INPUT)
    except RunError as error:
        return fail([f"{NAME}: {error}"], NOT_CONFORMANT)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_CONFORMANT
    except OSError as error:
        file = error.filename or "a file"
        return fail([f"{NAME}: {file} cannot be used: {error.strerror or error}."], BAD_INPUT)
    except KeyboardInterrupt:
        return fail([f"{NAME}: interrupted"], NOT_CONFORMANT)


def run(arguments: argparse.Namespace) -> int:
    """Run the cases on an implementation."""
    _adapters.adapter_path(arguments.impl)  # a wrong name is an error before torch is imported
    if arguments.explain:
        return _explain(arguments)
    known = _known_failures.load(arguments.known_failures)
    if arguments.out is not None:
        _clear(arguments.out)
    report = run_cases(_options.arguments(arguments), jobs=_jobs(arguments))
    if known:
        rows, untrue = _known_failures.announce(report["rows"], known)
        facts = {word: report[word] for word in ("implementation", "environment", "claims")}
        report = _report.build(**facts, rows=rows, problems=[*report["problems"], *untrue])
    lines = _summary.summary(report, load_registry())
    if arguments.out is not None:
        _run.write_all(report, arguments.out, lines)
    say(*lines)
    return _report.exit_code(report)


def _clear(folder: Path) -> None:
    """Remove the output files of an earlier run, so that they are not mistaken for new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "summary.txt", *(f"badge-{area}.svg" for area in AREAS)):
        (folder / name).unlink(missing_ok=True)


def _jobs(arguments: argparse.Namespace) -> int:
    if arguments.jobs < 1:
        raise OptionError(f"--jobs is {arguments.jobs}; it must be at least 1.")
    return int(arguments.jobs)


def _explain(arguments: argparse.Namespace) -> int:
    """Print everything about one requirement, and run its cases without capturing output."""
    asked = _requirement_named(arguments.explain, load_registry(), "--explain")
    arguments.area, arguments.profile = asked.area, asked.profile
    say(*_summary.explained(asked, cases_by_id().get(asked.id, [])), "")
    command = [sys.executable, "-m", "pytest", str(CASES), f"--rootdir={CASES}"]
    command += ["-c", str(CASES / "pytest.ini"), "-p", "torchparts_conformance.plugin"]
    command += ["--tb=long", "-vv", "--no-header", "-rN", "--capture=fd"]
    command += ["--requirement", asked.id, *_options.arguments(arguments)]
    return subprocess.run(command, check=False, env=environment()).returncode


def _requirement_named(word: str, registry: _Registry, option: str) -> Requirement:
    if (id := word.upper()) not in registry:
        near = difflib.get_close_matches(id, registry, n=3) or list(registry)[:3]
        raise OptionError(f"{option} {id!r:.60} is unknown. Ids are such as {', '.join(near)}.")
    return registry[id]


def list_adapters(_: argparse.Namespace) -> int:
    """Print every short name, and whether its implementation is installed."""
    for name, path in sorted(_adapters.known_adapters().items()):
        origin = "shipped" if name in _adapters.SHIPPED else "entry point"
        say(f"{name:<14} {origin:<12} {_adapters.installed(name)}  ({path})")
    return CONFORMANT


def doctor(arguments: argparse.Namespace) -> int:
    """Import an adapter and its parts, and print what a verdict would cover."""
    registry = load_registry()
    implementation = _adapters.load_implementation(arguments.impl)
    check_capabilities(implementation, registry)
    say(f"{implementation.name} {implementation.version}, protocol {implementation.protocol}")
    for name in implementation.distributions:
        found = _adapters.version_of(name)
        say(f"distribution {name}: {found or f'missing; run python -m pip install {name}'}")
    if unfit := unfit_torch(implementation):
        return fail([unfit], NOT_CONFORMANT)
    claims = Claims(implementation)
    for area in AREAS:
        if implementation.provides(area):
            say(*_coverage(claims, area, registry))
        else:
            say(f"{area}: not provided")
    return CONFORMANT


def _coverage(claims: Claims, area: str, registry: _Registry) -> Iterator[str]:
    """Count the requirements of each profile that would be judged, with reasons for the others."""
    part = _adapters.load_part(claims.implementation, area)
    lacks = claims.implementation.lacks.get(area, {})
    missing: dict[str, str] = {}
    for case in find_cases():
        if case.area == area:
            function = case.name.partition("::")[2]
            needs = needs_of(case.path, function)
            why = why_missing(part, needs, lacks, case.ids)
            missing |= dict.fromkeys(case.ids, why) if why else {}
    mine = [r for r in registry.values() if r.area == area]
    counts = {}
    for profile in sorted({r.profile for r in mine}, key=profile_order):
        ids = [r.id for r in mine if r.profile == profile]
        counts[profile] = f"{profile} {sum(id not in missing for id in ids)} of {len(ids)}"
    yield f"{area}: the verdict is about {counts.pop(CORE, 'nothing')} requirements"
    for profile, count in counts.items():
        is_claimed = claims.implementation.claims(area, profile)
        how = "claimed" if is_claimed else f"run with --profile {profile}"
        yield f"  beside it, torchparts' own: {count}, {how}"
    reasons: dict[str, list[str]] = {}
    for requirement in (r for r in mine if not claims.why_not(r)[0]):
        if requirement.id in missing:
            reasons.setdefault(missing[requirement.id], []).append(requirement.id)
    yield from (f"  not provided {', '.join(ids)}: {why}" for why, ids in reasons.items())


def verify(arguments: argparse.Namespace) -> int:
    """Run a sample of the requirements of a report again, and compare the outcomes."""
    report = _report.read(arguments.report)
    seed = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    ids = _verify.sample(report, arguments.sample, seed)
    if not ids:
        raise ReportError("nothing of the report was run, or --sample is below 1.")
    found = _verify.rerun(report, ids, impl=arguments.impl, jobs=_jobs(arguments))
    say(f"{len(ids)} requirements were run again, with seed {seed}")
    if not found:
        say(f"{report['implementation']['name']}: {report['verdict']}, nothing contradicts it")
    return fail(found, NOT_CONFORMANT)


def publish(arguments: argparse.Namespace) -> int:
    """Add reports to the results file of the site."""
    reports = [(path, _report.read(path)) for path in arguments.reports]
    found = [f"{path}: {text}" for path, report in reports for text in _unpublishable(report)]
    if found:
        return fail(found, NOT_CONFORMANT)
    new = [result for _, report in reports for result in _results.results_of(report)]
    merged = _results.merged(_results.read(arguments.results), new)
    _report.write(arguments.results, _results.to_text(merged, load_registry()))
    return CONFORMANT


def _unpublishable(report: Mapping[str, Any]) -> list[str]:
    outcomes = {row["outcome"] for row in report["rows"]}
    problems = [text[:200] for text in report["problems"]]
    if "not_run" in outcomes:
        problems.append("cases were left out")
    if "no_device" in outcomes:
        problems.append("a requested device was missing")
    return problems


def print_trace(_: argparse.Namespace) -> int:
    """Print the tests of PyTorch, each with its requirement and case."""
    lines, problems = trace()
    say(*lines, f"{len(lines)} source tests, {len(problems)} problems")
    return fail(problems, SUITE_BROKEN)


def mutants(arguments: argparse.Namespace) -> int:
    """Run each broken implementation on the requirements that it must fail."""
    registry = load_registry()
    words = arguments.requirement.split(",") if arguments.requirement else []
    asked = [_requirement_named(word, registry, "--requirement") for word in words]
    if asked and arguments.area != "all":
        raise OptionError("--requirement was given with --area. Give one of them.")
    tried = _mutation.try_all(
        arguments.folder,
        dict.fromkeys(r.area for r in asked) or _options.areas_of(arguments.area),
        requirements=[r.id for r in asked],
        base=arguments.impl,
        jobs=_jobs(arguments),
    )
    say(f"{sum(t.is_caught for t in tried)} of {len(tried)} broken implementations caught")
    wrong = [f"{t.mutant.name} of {t.mutant.area}: {t}" for t in tried if not t.is_caught]
    broken = {id for t in tried for id in t.asked}
    wrong += [f"{r.id} has no broken implementation" for r in asked if r.id not in broken]
    return fail(wrong, SUITE_BROKEN)


_FIRST_STEPS = """\
first steps, with a wrapper in my_wrapper.py:
  write my_adapter.py:
    from torchparts_conformance import Implementation
    implementation = Implementation("mine", "1.0", parts={"ckpt-wrap": "my_wrapper"})
  torchparts-conformance doctor my_adapter:implementation
  torchparts-conformance run --impl my_adapter:implementation
"""


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors on one line and exits with code 4."""

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}", is_wrong=True)
        self.exit(BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=NAME,
        description="Check implementations against the requirements.",
        epilog=_FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def without_command(_: argparse.Namespace) -> int:
        parser.print_help()
        return BAD_INPUT

    parser.set_defaults(command=without_command)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(command: Callable[[argparse.Namespace], int], name: str = "") -> Callable[..., Any]:
        text = (command.__doc__ or "").partition("\n")[0]
        added = commands.add_parser(
            name or command.__name__, help=text, description=text, allow_abbrev=False
        )
        added.set_defaults(command=command)
        return added.add_argument

    def add_jobs(option: Callable[..., Any]) -> None:
        number = min(2, os.cpu_count() or 1)
        option("--jobs", type=int, default=number, help="processes at a time; default: 2")

    option = add(run)
    for each in (*_options.OPTIONS, _options.KNOWN_FAILURES, _options.OUT):
        each.add_to(option)
    option("--explain", metavar="ID", help="run one requirement and show everything")
    add_jobs(option)
    add(doctor)("impl", nargs="?", help="short name or module:attribute")
    add(list_adapters, "list")
    option = add(verify)
    option("report", type=Path)
    option("--impl", required=True, help="the implementation to run again")
    option("--sample", type=int, default=20, help="requirements to run again; default: 20")
    option("--seed", type=int, help="of the sample; default: a random one")
    add_jobs(option)
    option = add(publish)
    option("results", type=Path, help="the results file")
    option("reports", type=Path, nargs="+", help="reports to add")
    add(print_trace, "trace")
    option = add(mutants)
    option("folder", type=Path, help="folder of <area>_<topic>.py files")
    option("--area", default="all", help="comma-separated areas; default: all")
    option("--requirement", help="run only these ids, comma-separated")
    option("--impl", default="ours", help="the working implementation to break")
    add_jobs(option)
    return parser
