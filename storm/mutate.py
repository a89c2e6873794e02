"""Change one token of a package's source, again and again, and see whether its tests notice.

    nox -s "mutate(mod-tracker)" -- --count 150 --seed 0

Each change is made in a copy of the source. Its tests run in a forked process, those that run the
changed line first, until one fails. A change that no test notices is printed with its place: it
wants a test, or an entry in equivalent.toml that says why nothing changes. Exits with 1 if under
95 % of the changes that matter were caught.

A change is given `--seconds` of tests, by what they take without it: the likeliest first. What
the others would say is not known, and the change counts as one that survived, so that the share
that is printed is a lower bound.

What was seen is kept in .mutate/. After a test was added, `--again` tries only what survived or is
new; its counts are over all changes, those of earlier runs with them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

# What a child would otherwise import each time, and nothing of the packages.
import hypothesis.strategies
import mutation_page
import torch._dynamo
import torch._subclasses
import torch.profiler
import torch.utils.checkpoint
from mutation_equivalent import Known, load
from mutation_points import Mutant, sample, source_files
from mutation_tests import OPTIONS, SLOW_TOO, Tests, learn
from mutation_trials import Bench

ROOT = Path(__file__).parent.parent
PACKAGES = {
    name: Path("packages") / name
    for name in ("ckpt-wrap", "mod-tracker", "flat-param", "sac-policies")
} | {"conformance": Path("conformance")}
TESTS_IN_SOURCE = "torchparts_conformance/cases/"
"""Not changed: the cases are tests, and what they notice is shown by the suite's own mutants."""

WANTED = 0.95
SUMMARY = Path(".mutate/summary.json")


@dataclass(frozen=True)
class Trial:
    """One mutant and its end: "caught", "timed out", "survived" or "equivalent"."""

    end: str
    by: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    nth: int = 0

    @property
    def key(self) -> str:
        """What stays the same as long as the line does."""
        return f"{self.file}|{self.operator}|{self.before}|{self.after}|{self.nth}"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line} {self.operator}"
        return f"{self.end:10} {place}\n    - {self.before}\n    + {self.after}"


def import_name(package: str) -> str:
    """Give the name under which a distribution is imported."""
    return "torchparts_conformance" if package == "conformance" else package.replace("-", "_")


def tests_of(package: str) -> list[str]:
    """Give the paths of one distribution's own tests and of the code in its pages."""
    if package == "conformance":
        return ["conformance/selftest"]
    pages = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / package).glob("*.md"))
    home = PACKAGES[package].as_posix()
    return [f"{home}/tests", f"{home}/src", f"{home}/README.md", *pages]


def attempt(bench: Bench, tests: Tests, mutant: Mutant, left_s: float) -> tuple[str, str]:
    """Run tests that take `left_s` seconds against one mutant.

    Returns:
        its end, and the test that ended it; of one that survived, how many tests were not run.
    """
    point, passing, left_out = mutant.point, tests.passing(), 0
    bench.write(point.file, mutant.source)
    try:
        for wanted in tests.rounds(mutant):
            names = tests.within(wanted, left_s)
            left_out += len(wanted) - len(names)
            if not names:
                continue
            files = list(dict.fromkeys(name.partition("::")[0] for name in names))
            times = [passing[name]["seconds"] for name in names]
            run = bench.run([*tests.options, *files], order=names, usual_s=max(times))
            if run.status != "passed":
                return ("timed out" if run.status == "hung" else "caught"), run.by
            left_s -= max(run.seconds, sum(times))
    finally:
        bench.write(point.file, tests.source[point.file])
    return "survived", f"{left_out} tests were not run" if left_out else ""


def run_all(
    bench: Bench,
    tests: Tests,
    mutants: Iterable[Mutant],
    known: Known,
    seen: dict[str, Trial],
    keep: Callable[[], None],
    seconds: float,
) -> list[Trial]:
    """Try every mutant, and say how each ended; those in `seen` are not tried again.

    `keep` is called after each, so that what was seen outlives a run that is ended. Each is given
    `seconds` of tests.
    """
    done = []
    for number, mutant in enumerate(mutants, 1):
        point, start = mutant.point, time.monotonic()
        place = (point.file, point.start[0], point.operator)
        trial = Trial("equivalent", "", *place, mutant.before, mutant.after, mutant.nth)
        if known.covers(mutant):
            pass
        elif trial.key in seen:
            trial = seen[trial.key]
        else:
            end, by = attempt(bench, tests, mutant, seconds)
            trial = replace(trial, end=end, by=by)
            took = f"{time.monotonic() - start:.1f} s"
            print(f"[{number}] {trial}\n    {took} {by}", flush=True)
            seen[trial.key] = trial
            keep()
        done.append(trial)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, try the mutants, and print the counts and the survivors."""
    parser = argparse.ArgumentParser(prog="mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--package", choices=PACKAGES)
    parser.add_argument("--count", type=int, default=150, help="how many changes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which changes (%(default)s)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds that one test may take, or ten times its usual (%(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="how long the tests may take that each change is given (%(default)s)",
    )
    parser.add_argument("--only", metavar="FILE", help="change this file alone, such as _names.py")
    parser.add_argument("--again", action="store_true", help="try only what survived last time")
    parser.add_argument("--slow", action="store_true", help="run tests that are marked slow, too")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="run nothing; write the counts of the last runs"
    )
    args = parser.parse_args(argv)
    if (args.package is None) == (args.page is None):
        parser.error("either --package or --page is needed")
    if args.page is not None:
        told = json.loads((ROOT / SUMMARY).read_text(encoding="utf-8"))
        args.page.write_text(mutation_page.page(told, PACKAGES), encoding="utf-8")
        return 0
    if not hasattr(os, "fork"):
        parser.error("this system cannot fork, but each change is tried in a forked process")
    return mutate(ROOT, args)


def mutate(root: Path, args: argparse.Namespace) -> int:
    """Do what the command line says; return the exit code."""
    hypothesis.settings.register_profile(
        "mutate",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutate")
    torch.set_num_threads(1)
    source, cache = root / PACKAGES[args.package] / "src", root / ".mutate"
    sources = {
        file: text
        for file, text in source_files(source).items()
        if file.endswith(args.only or "") and not file.startswith(TESTS_IN_SOURCE)
    }
    mutants = sample(sources, args.count, args.seed)
    known = load(root / "storm/equivalent.toml", args.package)
    record = cache / f"{args.package}.trials.json"
    before = _read(record, sources) if args.again else {}
    bench = Bench(root, source, import_name(args.package), stall_s=args.timeout)
    seen = {key: trial for key, trial in before.items() if trial.end in ("caught", "timed out")}
    try:
        options = SLOW_TOO if args.slow else OPTIONS
        tests = learn(bench, tests_of(args.package), cache / f"{args.package}.tests.json", options)
        for name in tests.failing():
            print(f"left out, as it fails without a change: {name}")
        keep = partial(_write, record, sources, seen)
        done = run_all(bench, tests, mutants, known, seen, keep, args.seconds)
    finally:
        bench.close()
    if args.only is None:
        mutation_page.note(root / SUMMARY, args.package, args.seed, counted(done), cut_short(done))
    return report(done, known.stale(source_files(source)))


def counted(done: Sequence[Trial]) -> dict[str, int]:
    """How many had each end."""
    return {end: sum(trial.end == end for trial in done) for end in mutation_page.ENDS}


def cut_short(done: Sequence[Trial]) -> int:
    """How many survived without having been given every test."""
    return sum(trial.end == "survived" and bool(trial.by) for trial in done)


def report(done: Sequence[Trial], stale: Sequence[str]) -> int:
    """Print the counts, the survivors and the stale entries; return the exit code."""
    count = counted(done)
    share, matter = mutation_page.share(count)
    print()
    for trial in done:
        if trial.end == "survived":
            print(trial)
    for entry in stale:
        print(f"stale in equivalent.toml, as no such change can be made: {entry}")
    told = ", ".join(f"{number} {end}" for end, number in count.items())
    print(f"{len(done)} tried: {told}; {100 * share:.1f} % of {matter} noticed")
    if cut := cut_short(done):
        print(f"a lower bound: {cut} survived the tests they were given time for, and not all")
    return int(share < WANTED)


def _read(record: Path, sources: dict[str, str]) -> dict[str, Trial]:
    """Trials of files that are still what they were."""
    if not record.exists():
        return {}
    told = json.loads(record.read_text(encoding="utf-8"))
    same = {file for file, text in sources.items() if told["files"].get(file) == _digest(text)}
    trials = (Trial(**entry) for entry in told["trials"])
    return {trial.key: trial for trial in trials if trial.file in same}


def _write(record: Path, sources: dict[str, str], seen: dict[str, Trial]) -> None:
    """Keep the trials of these files, and what is there of others."""
    record.parent.mkdir(parents=True, exist_ok=True)
    old = {"files": {}, "trials": []}
    if record.exists():
        old = json.loads(record.read_text(encoding="utf-8"))
    others = [entry for entry in old["trials"] if entry["file"] not in sources]
    told = {
        "files": old["files"] | {file: _digest(text) for file, text in sources.items()},
        "trials": others + [asdict(trial) for trial in seen.values()],
    }
    record.write_text(json.dumps(told, indent=1), encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
