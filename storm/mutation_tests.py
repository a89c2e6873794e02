"""The tests of one package: how long each takes, which lines it runs, and which come first.

Known from one run of every test file with coverage, kept in a cache by what the source and the
file were.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation_points import Mutant, is_in_function, source_files, statement_lines
from mutation_trials import AT_IMPORT, Bench, Run

FIRST = 25
FIRST_FILES = 3
"""At most so many tests, of so many files, are in the first round, in which most mutants fall."""

SLOW_S = 1.0
"""Tests that take longer come after the others."""

NAMED, RELATED, OTHER = range(3)
"""What a test file has to do with a module."""

OPTIONS = ("-m", "not slow and not cuda")
SLOW_TOO = ("-m", "not cuda")
"""Options of pytest: without the tests marked slow, and with them."""


@dataclass
class Tests:
    """What the tests of a package do when nothing is changed.

    Attributes:
        source: text of each source file.
        known: for each test file, its tests and the lines they run; see `Run`.
        texts: text of each test file.
        options: of pytest.
    """

    source: dict[str, str]
    known: dict[str, Run] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = OPTIONS

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
        """Give the tests that concern a mutant, in two rounds, the likeliest first.

        They are the tests that run its line, those of files that are named after the module or
        import it, and those of which it is not known what they run, as it happens elsewhere. If
        the line runs while the module is imported, or nothing is known to run it, they are all.
        Distributed tests are asked only about a module in whose folder something is distributed.

        The first round has a few tests that run the line; of a line that runs at import, a few of
        the files that have to do with the module. Tests that run a line of a function come before
        those that do not; the file of the same word comes before files that are named like it or
        like its folder or import it, or are about all public names, and these before the others,
        quick tests before slow ones, and files of which more tests run the line before others;
        else tests stay in their order. Examples in pages come last, each page from its beginning: a
        line of it needs those before it.
        """
        file, passing = mutant.point.file, self.passing()
        folder = Path(file).parent
        across = any(
            "distributed" in self.source[f] for f in self.source if Path(f).parent == folder
        )
        rank = {test: self._rank(file, test) for test in self.known}
        running, at_import = self._running(mutant)
        held = Counter(name.partition("::")[0] for name in running)

        def early(name: str) -> tuple[int, int, bool, int]:
            test, slow = name.partition("::")[0], passing[name]["seconds"] > SLOW_S
            asked_by = (rank[test], name not in running), (name not in running, rank[test])
            return *asked_by[not at_import], slow, -held[test]

        asked = [name for name, entry in passing.items() if across or not entry["dist"]]
        tests = sorted((name for name in asked if _is_test(name)), key=early)
        likely = [name for name in tests if name in running and not at_import]
        first = _few(likely or [n for n in tests if rank[n.partition("::")[0]] < OTHER])
        if running and not at_import:
            # An example needs those before it, and fails alone whatever was changed.
            pages = {name.partition("::")[0] for name in running if not _is_test(name)}
            seen = self._seen()
            asked = [
                name
                for name in asked
                if name.partition("::")[0] in pages
                or (_is_test(name) and (name in running or name not in seen))
                or (_is_test(name) and rank[name.partition("::")[0]] < OTHER)
            ]
        rest = set(asked) - set(first)
        last = [name for name in asked if not _is_test(name)]
        return [first, [name for name in tests if name in rest] + last]

    def within(self, names: Sequence[str], left_s: float) -> list[str]:
        """Take tests from the front until their usual times add up to `left_s` seconds."""
        passing, taken = self.passing(), []
        for name in names:
            if left_s <= 0:
                break
            taken.append(name)
            left_s -= passing[name]["seconds"]
        return taken

    def _seen(self) -> set[str]:
        """Tests that ran any line of the source where it could be seen."""
        found = set()
        for run in self.known.values():
            names = list(run.tests)
            for lines in run.lines.values():
                found |= {
                    names[index] for indexes in lines.values() for index in indexes if index >= 0
                }
        return found

    def _running(self, mutant: Mutant) -> tuple[set[str], bool]:
        """Tests that run the mutant's line, and whether it runs at import."""
        file, line = mutant.point.file, mutant.point.start[0]
        found, at_import = set(), not is_in_function(self.source[file], line)
        for run in self.known.values():
            names, lines = list(run.tests), run.lines.get(file, {})
            for number in statement_lines(self.source[file], line):
                indexes = lines.get(str(number), ())
                at_import |= AT_IMPORT in indexes
                found |= {names[index] for index in indexes if index != AT_IMPORT}
        return found, at_import

    def _rank(self, file: str, test: str) -> int:
        word, about = Path(file).stem.lstrip("_"), Path(test).stem.removeprefix("test_")
        if about == word:
            return NAMED
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        names = (*word.split("_"), Path(file).parent.name, "public_api")
        named_like_it = word in about or about in names
        return RELATED if named_like_it or f"{module} import" in self.texts[test] else OTHER


def _few(names: list[str]) -> list[str]:
    """Give the first tests of the first files: to collect a file takes longer than a test."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in names))[:FIRST_FILES]
    return [name for name in names if name.partition("::")[0] in files][:FIRST]


def _is_test(name: str) -> bool:
    return Path(name.partition("::")[0]).name.startswith("test_")


def learn(
    bench: Bench, paths: Sequence[str], cache: Path, options: tuple[str, ...] = OPTIONS
) -> Tests:
    """Run every test file once with coverage, or take what the cache knows of it."""
    tests = Tests(source_files(bench.copy), options=options)
    state = _digest([*tests.source.values(), *_surroundings(bench.root, paths), *options])
    old = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    kept = {}
    for path in _files(bench.root, paths):
        text = (bench.root / path).read_text(encoding="utf-8")
        key = _digest([state, text])
        entry = old.get(path)
        if entry is None or entry["key"] != key:
            run = _meet(bench, path, options)
            print(f"{path}: {len(run.tests)} tests, {run.seconds:.0f} s", flush=True)
            entry = {"key": key, "seconds": run.seconds, "tests": run.tests, "lines": run.lines}
        if entry["tests"]:
            tests.known[path] = Run("", "", entry["seconds"], entry["tests"], entry["lines"])
            tests.texts[path] = text
        kept[path] = entry
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(old | kept), encoding="utf-8")
    return tests


def _meet(bench: Bench, path: str, options: tuple[str, ...]) -> Run:
    run = bench.run([*options, path], usual_s=60.0, coverage=True, stop=False)
    failed = [name for name, entry in run.tests.items() if entry["outcome"] == "failed"]
    if failed:
        # Some tests cannot be traced. Without it they may pass, and count, as running no line.
        again = bench.run([*options, path], order=failed, usual_s=60.0, stop=False)
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
