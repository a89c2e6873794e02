"""Every measured figure of a README or page is from a file that a run wrote.

    python .ci/figures.py            name each figure that has no source; exit with 1
    python .ci/figures.py --record   note what the benchmark pages say, after copying a run's output

A figure is a number with a unit, or a table's cell of nothing but numbers with a decimal point. It
is a fault but in four places: code; a table or paragraph right after `<!-- figures: FILE -->`,
where FILE says the same number; a fact that nobody measured, in `NOT_MEASURED`; and `RESULTS`,
the pages whose tables are a run's output; `copied_figures.txt` notes a digest
of each page's numbers, so that one that is changed by hand is seen. Pages in `WRITTEN` are
written by a run, and tests hold them to its file.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = Path(__file__).with_name("copied_figures.txt")
RESULTS = ("docs/benchmarks/*.md", "docs/downstream.md")
WRITTEN = ("docs/models.md", "docs/conformance/", "docs/notes/")
NOT_MEASURED = {  # limits and sizes that the code has, and how long a thing may take
    "docs/ckpt-wrap/reference.md": {"1 GiB"},
    "docs/flat-param/design.md": {"32 KiB", "4 KiB", "16 bytes"},
    "docs/flat-param/how-to.md": {"4 MiB"},
    "docs/flat-param/tutorial.md": {"16 bytes"},
    "docs/mod-tracker/reference.md": {"8 times", "20 ms"},
    "docs/sac-policies/recipe.md": {"16 KiB", "1 KiB", "5,056 bytes", "80 %", "60 %"},
}
_UNIT = (
    r"(?:MiB|GiB|KiB|[kKMG]B|bytes|ms|us|µs|ns|seconds?|minutes?|hours?|s|x|times|%|percent"
    r"|[MGT]?FLOPs?)"
)
FIGURE = re.compile(rf"(?<![\w.`-])\d[\d,]*(?:\.\d+)?\s?{_UNIT}(?!\w)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_CELL = re.compile(rf"[\d.,\s*]*\d[\d.,\s*]*(?:{_UNIT})?(?:\s?(?:to|and|,)\s?[\d.,\s*]+{_UNIT}?)*")
_MEASURED = re.compile(rf"\d\.\d|\d\s?{_UNIT}(?!\w)")  # a bare count is none
_MARK = re.compile(r"^<!-- figures: (\S+) -->$")


def results() -> list[Path]:
    """The pages whose tables are the output of a run, copied or written."""
    return sorted(path for pattern in RESULTS for path in ROOT.glob(pattern))


def sources() -> list[Path]:
    """The READMEs and pages that are looked through."""
    found = [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("packages/*/README.md")]
    found += ROOT.glob("docs/**/*.md")
    benchmarks = set(results())
    return sorted(
        path
        for path in found
        if path not in benchmarks and not path.relative_to(ROOT).as_posix().startswith(WRITTEN)
    )


def numbers_of(path: Path) -> set[str]:
    """The numbers that a result says; of bytes in a JSON file, MiB with one digit as well."""
    text = path.read_text(encoding="utf-8")
    found = {number.rstrip(",") for number in NUMBER.findall(text)}
    if path.suffix == ".json":
        for size in re.findall(r'bytes": (\d+)', text):
            found.add(f"{int(size) / 2**20:.1f}")
        rows = json.loads(text).get("rows", [])
        kept = [row["kept_bytes"] for row in rows if "kept_bytes" in row]
        found |= {f"{kept[0] / size:.0f}" for size in kept if size}  # times less than the first
    return found


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, source or "", text) of each paragraph and table, without code."""
    for pattern in (r"^(```|~~~).*?^\1", r"<!--(?! figures:).*?-->"):
        text = re.sub(
            pattern, lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
        )
    text = re.sub(r"`[^`\n]*`", "``", text)
    source, kept, start = "", [], 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip():
            start = start if kept else number
            kept.append(line)
        elif kept:
            block = "\n".join(kept)
            mark = _MARK.match(block)
            if mark is None:
                yield start, source, block
            source, kept = mark[1] if mark else "", []


def figures(block: str) -> list[str]:
    """The figures of a paragraph or table."""
    if not block.startswith("|"):
        return FIGURE.findall(block)
    cells = [cell.strip() for row in block.splitlines()[2:] for cell in row.split("|")[2:-1]]
    whole = [cell for cell in cells if _CELL.fullmatch(cell) and _MEASURED.search(cell)]
    return whole + [found for cell in cells if cell not in whole for found in FIGURE.findall(cell)]


def unfounded(name: str, text: str) -> Iterator[str]:
    """Yield each figure of a page that has no source, or that its source does not say."""
    allowed = NOT_MEASURED.get(name, set())
    for line, source, block in blocks(text):
        if source and not (ROOT / source).exists():
            yield f"{name}:{line} names {source}, which is not there"
            continue
        known = numbers_of(ROOT / source) if source else set()
        for figure in figures(block):
            if figure.strip() in allowed:
                continue
            if not source:
                yield f"{name}:{line} says {figure!r}: put <!-- figures: FILE --> above"
            elif any(number.rstrip(",") not in known for number in NUMBER.findall(figure)):
                yield f"{name}:{line} says {figure!r}, and {source} does not"


def digests() -> dict[str, str]:
    """A digest of the numbers of each benchmark page."""
    found = {}
    for path in results():
        said = " ".join(NUMBER.findall(path.read_text(encoding="utf-8")))
        found[path.name] = hashlib.sha256(said.encode()).hexdigest()[:16]
    return found


def changed() -> Iterator[str]:
    """Yield each benchmark page whose numbers are others than those that were noted."""
    text = NOTE.read_text(encoding="utf-8") if NOTE.exists() else ""
    noted = dict(line.split() for line in text.splitlines())
    for name, digest in digests().items():
        if noted.get(name) != digest:
            yield (
                f"{name} has other numbers than were noted: run what it is from, "
                "copy what that prints, then python .ci/figures.py --record"
            )


def main() -> int:
    """Compare, or note."""
    if "--record" in sys.argv[1:]:
        lines = (f"{name} {digest}\n" for name, digest in digests().items())
        NOTE.write_text("".join(lines), encoding="utf-8")
    found = list(changed())
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        found += unfounded(name, path.read_text(encoding="utf-8"))
    for line in found:
        print(f"figures: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
