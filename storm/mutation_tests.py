"""The tests of one package: how long each takes, which lines it runs, and which come first.

Known from one run of every test file with coverage, kept in a cache by what the source and the
file were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation_points import Mutant, source_files, statement_lines
from mutation_trials import Bench, Run

FIRST = 40
"""Tests of the first round, in which most mutants fall, so that few files are collected."""

OPTIONS = ("-m", "not slow and not cuda")


@dataclass
class Tests:
    """What the tests of a package do when nothing is changed.

    Attributes:
        source: text of each source file.
        known: for each test file, its tests and the lines they run; see `Run`.
        texts: text of each test file.
    """

    source: dict[str, str]
    known: dict[str, Run] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def passing(self) -> dict[str, dict[str, Any]]:
        """Tests that pass when nothing is changed, and what is known of each."""
        return {
            name: entry
            for run in self.known.values()
            for name, entry in run.tests.items()
            if entry["outcome"] == "passed"
        }

    def failing(self) -> list[str]:
        """Tests that fail when nothing is changed, and can show nothing."""
        return [
            name
            for run in self.known.values()
            for name, entry in run.tests.items()
            if entry["outcome"] == "failed"
        ]

    def rounds(self, mutant: Mutant) -> list[list[str]]:
        """Give the tests that concern a mutant, those that run its line first, then all others.

        In both rounds the file of the same word comes first, then files that import the module,
        then the others; a file's quick tests before its slow ones. Distributed tests are asked
        only about a module that is distributed, as what they run elsewhere is not seen.
        """
        file, passing = mutant.point.file, self.passing()
        across = "distributed" in self.source[file]
        seconds = {
            name: entry["seconds"] for name, entry in passing.items() if across or not entry["dist"]
        }
        rank = {test: self._rank(file, test) for test in self.known}

        def early(name: str) -> tuple[int, float]:
            return rank[name.partition("::")[0]], seconds[name]

        running = self._running(mutant) & seconds.keys()
        first = sorted(running, key=early)[:FIRST]
        return [first, sorted(seconds.keys() - set(first), key=early)]

    def _running(self, mutant: Mutant) -> set[str]:
        file, line = mutant.point.file, mutant.point.start[0]
        found = set()
        for run in self.known.values():
            names, lines = list(run.tests), run.lines.get(file, {})
            for number in statement_lines(self.source[file], line):
                found |= {names[index] for index in lines.get(str(number), ())}
        return found

    def _rank(self, file: str, test: str) -> int:
        word = Path(file).stem.lstrip("_")
        if Path(test).stem == f"test_{word}":
            return 0
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return 1 if f"{module} import" in self.texts[test] else 2


def learn(bench: Bench, paths: Sequence[str], cache: Path) -> Tests:
    """Run every test file once with coverage, or take what the cache knows of it."""
    tests = Tests(source_files(bench.copy))
    state = _digest([*tests.source.values(), *_surroundings(bench.root, paths)])
    old = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    kept = {}
    for path in _files(bench.root, paths):
        text = (bench.root / path).read_text(encoding="utf-8")
        key = _digest([state, text])
        entry = old.get(path)
        if entry is None or entry["key"] != key:
            run = _meet(bench, path)
            print(f"{path}: {len(run.tests)} tests, {run.seconds:.0f} s", flush=True)
            entry = {"key": key, "seconds": run.seconds, "tests": run.tests, "lines": run.lines}
        if entry["tests"]:
            tests.known[path] = Run("", "", entry["seconds"], entry["tests"], entry["lines"])
            tests.texts[path] = text
        kept[path] = entry
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(old | kept), encoding="utf-8")
    return tests


def _meet(bench: Bench, path: str) -> Run:
    run = bench.run([*OPTIONS, path], usual_s=60.0, coverage=True, stop=False)
    failed = [name for name, entry in run.tests.items() if entry["outcome"] == "failed"]
    if failed:
        # Some tests cannot be traced. Without it they may pass, and count, as running no line.
        again = bench.run([*OPTIONS, path], order=failed, usual_s=60.0, stop=False)
        run.tests.update(again.tests)
    if run.status in ("died", "hung") or run.by.endswith("(not collected)"):
        print(f"{path}: {run.status} at {run.by!r}\n{bench.log()[-2000:]}")
    return run


def _files(root: Path, paths: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        where = root / path
        if where.is_dir():
            pattern, holds = ("*.py", ">>>") if where.name == "src" else ("test_*.py", "def test_")
            files = [file for file in sorted(where.rglob(pattern)) if holds in file.read_text()]
            found += [str(file.relative_to(root)) for file in files]
        elif where.exists():
            found.append(path)
    return found


def _surroundings(root: Path, paths: Iterable[str]) -> list[str]:
    """Texts that every test depends on: what is beside the test files."""
    texts = [
        file.read_text(encoding="utf-8")
        for path in paths
        if (root / path).is_dir()
        for file in sorted((root / path).rglob("*.py"))
        if not file.name.startswith("test_") and "src" not in file.parts
    ]
    shared = (root / "conftest.py", root / "pyproject.toml")
    return texts + [file.read_text(encoding="utf-8") for file in shared if file.exists()]


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
