"""What mkdocs writes into pages: every public name, every message, every change.

`mkdocs.yml` names this file as a hook. A line `<!-- names of ckpt_wrap -->` in a page becomes an
entry for each name of that package's `__all__`; `<!-- messages of ckpt_wrap -->` becomes a list of
what the package says in errors and warnings; `<!-- changes of packages/ckpt-wrap -->` becomes its
changelog, and `<!-- versions of torch -->` a table of what ran on each. All are read from the
repository, so none is ever old.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import changes as fragments

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    path.name: path for path in (*ROOT.glob("packages/*/src/*"), *ROOT.glob("conformance/src/*"))
}
GAP = "…"  # stands in a message for what differs from time to time


class Message(NamedTuple):
    """One sentence of an error or warning, and where it is written."""

    text: str
    place: str


class Name(NamedTuple):
    """A public name, and where it is defined."""

    name: str
    path: str
    line: int


@functools.lru_cache(None)
def public_names(package: str) -> list[str]:
    """The package's `__all__`, without what is no interface."""
    tree = ast.parse((SOURCES[package] / "__init__.py").read_text(encoding="utf-8"))
    (found,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return sorted(name for name in found if not name.startswith("_"))


def definition(package: str, name: str) -> Name:
    """Where a public name is defined."""
    written = re.compile(rf"^(?:class|def) {name}\b|^{name}(?:: [^=\n]+)? = ", re.MULTILINE)
    for path in sorted(SOURCES[package].rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if found := written.search(text):
            line = text.count("\n", 0, found.start()) + 1
            return Name(name, path.relative_to(ROOT).as_posix(), line)
    raise LookupError(f"pages: {package}.{name} is in __all__, but no file defines it.")


def messages(package: str) -> list[Message]:
    """Every sentence that begins with the package's name and a function, in order of its text.

    And those of torch that the drop-in names keep, which begin in other ways.
    """
    begins = re.compile(rf"^{package}\.[\w.{GAP}]+: (?!{GAP}$)")
    found: dict[str, Message] = {}
    for path in sorted(SOURCES[package].rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        raised = [node.exc.args[:1] for node in ast.walk(tree) if _is_raised_call(node)]
        sentences = {id(argument) for arguments in raised for argument in arguments}
        for node, text in _texts(tree):
            said = id(node) in sentences and text[:1].isupper() and " " in text
            if said or begins.match(text):
                place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                found.setdefault(text, Message(text, place))
    return sorted(found.values())


def _is_raised_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)


def _texts(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Every whole string, with a gap for each value that is put into it."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    pieces = {id(part) for node in joined for part in node.values}
    for node in ast.walk(tree):
        if id(node) in pieces:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield node, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, node.value


def _entry(package: str, name: str, repository: str) -> str:
    """One entry of mkdocstrings, which begins with a heading, and where the source is."""
    found = definition(package, name)
    shown = f"`{found.path}`, line {found.line}"
    if repository:
        shown = f"[{shown}]({repository.rstrip('/')}/blob/main/{found.path}#L{found.line})"
    return f"::: {package}.{name}\n\nSource: {shown}\n"


def names_page(package: str, repository: str = "") -> str:
    """An entry for each public name."""
    return "\n".join(_entry(package, name, repository) for name in public_names(package))


def messages_page(package: str) -> str:
    """The list of messages, each with its next step, which is its own last sentence."""
    rows = (f"- `{text.replace('`', chr(39))}` ({place})" for text, place in messages(package))
    return "\n".join(rows)


def changes(folder: str) -> str:
    """A changelog without its title, its headings one level lower, with what waits for it."""
    text = (ROOT / folder / "CHANGELOG.md").read_text(encoding="utf-8")
    if waiting := fragments.by_kind(ROOT / folder):
        version = fragments.version_of(ROOT / folder)
        text = fragments.merged(text, version, f"## {version} - unreleased", waiting)
    _, _, rest = text.partition("\n")
    return re.sub(r"^(#+ )", r"#\1", rest.strip(), flags=re.MULTILINE)


def torch_versions() -> str:
    """A row for each torch that is pinned: what our reports of a run on it say, area by area."""
    found = [ROOT / "docs/conformance/reports/ours.json"]
    found += sorted(ROOT.glob("docs/conformance/past/ours-*.json"))
    runs: dict[str, dict[str, Any]] = {}
    for report in (json.loads(path.read_text(encoding="utf-8")) for path in found):
        number = report["environment"]["torch"].partition("+")[0]
        runs.setdefault(number.rpartition(".")[0], report)
    areas = runs[max(runs, key=_number)]["claims"]["areas"]
    pins = sorted(
        (path.stem.removeprefix("torch-") for path in (ROOT / "constraints").glob("torch-*.txt")),
        key=_number,
    )
    rows = [["torch", *areas, "run on"]]
    rows += [[pin, *_cells(runs.get(pin), areas)] for pin in pins]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _cells(report: dict[str, Any] | None, areas: list[str]) -> list[str]:
    """How many MUST requirements of each area passed, and where."""
    if report is None:
        return ["not run", *[""] * len(areas)]
    counts = []
    for area in areas:
        kept = [row["must"] for row in report["verdicts"] if row["area"] == area]
        passed, of = (sum(pair[place] for pair in kept) for place in (0, 1))
        counts.append(f"{passed} of {of}")
    where = report["environment"]
    return [*counts, f"torch {where['torch']}, Python {where['python']}, {where['platform']}"]


def on_page_markdown(markdown: str, *, config: Any, **rest: Any) -> str:
    """Called by mkdocs for each page."""

    def names(found: re.Match[str]) -> str:
        return names_page(found[1], config.get("repo_url") or "")

    if address := config.get("repo_url"):
        markdown = re.sub(r"(git clone |git\+)ADDRESS", rf"\g<1>{address}", markdown)
        markdown = markdown.replace("  # ADDRESS is that of this repository", "")
    markdown = re.sub(r"^<!-- names of (\w+) -->$", names, markdown, flags=re.MULTILINE)
    markdown = re.sub(
        r"^<!-- versions of torch -->$",
        lambda found: torch_versions(),
        markdown,
        flags=re.MULTILINE,
    )
    markdown = re.sub(
        r"^<!-- changes of ([\w/-]+) -->$",
        lambda found: changes(found[1]),
        markdown,
        flags=re.MULTILINE,
    )
    return re.sub(
        r"^<!-- messages of (\w+) -->$",
        lambda found: messages_page(found[1]),
        markdown,
        flags=re.MULTILINE,
    )
