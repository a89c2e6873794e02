"""Insert generated text into pages when mkdocs builds the site.

`mkdocs.yml` names this file as a hook. It replaces these lines of a page:

- `<!-- README.md -->`: the README, with links that work on the site.
- `<!-- README of packages/ckpt-wrap -->`: the README of one package.
- `<!-- names of ckpt_wrap: unwrap, offload_ -->`: a table of all names in the package's `__all__`,
  and an API entry for each. The listed names come first.
- `<!-- messages of ckpt_wrap -->`: the errors and warnings of the package.
- `<!-- changes of packages/ckpt-wrap -->`: the package's changelog.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    path.name: path for path in (*ROOT.glob("packages/*/src/*"), *ROOT.glob("conformance/src/*"))
}
GAP = "…"  # placeholder in a message for its variable parts


class Message(NamedTuple):
    """One sentence of an error or warning, and its place in the source."""

    text: str
    place: str


class Name(NamedTuple):
    """A public name and the place of its definition."""

    name: str
    path: str
    line: int
    kind: str
    summary: str


SUBMODULES = {
    "flat_param": ("handle", "plan"),
    "sac_policies": ("budget", "policies", "reports"),
}
"""Modules of a package whose names are public, too."""


@functools.lru_cache(None)
def public_names(package: str) -> list[str]:
    """Return the names in `__all__` of the package and of its public submodules."""
    source = SOURCES[package]
    found = _listed(source / "__init__.py")
    inner = [
        f"{module}.{name}"
        for module in SUBMODULES.get(package, ())
        for name in _listed(_module_file(source, module))
        if name not in found
    ]
    return sorted(name for name in found if not name.startswith("_")) + sorted(inner)


def _module_file(source: Path, module: str) -> Path:
    file = source / f"{module}.py"
    return file if file.exists() else source / module / "__init__.py"


def _listed(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(found)


def definition(package: str, name: str) -> Name:
    """Return the place of a definition, its kind, and the first sentence of its docstring.

    It is found through imports, since several files may define one name.
    """
    module, _, last = name.rpartition(".")
    source = SOURCES[package]
    path = _module_file(source, module) if module else source / "__init__.py"
    while last not in _definitions(path):
        if last not in _imports(path):
            raise LookupError(f"pages: {package}.{name} is in __all__, but no file defines it.")
        path = _imports(path)[last]
    found = _definitions(path)[last]
    return found._replace(name=name, kind=f"In {package}.{module}") if module else found


@functools.lru_cache(None)
def _definitions(path: Path) -> dict[str, Name]:
    """Return functions, classes and constants at the top of a file, by name."""
    found: dict[str, Name] = {}
    place = path.relative_to(ROOT).as_posix()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        for name, kind in _defined(node):
            found[name] = Name(name, place, node.lineno, kind, _first_sentence(node, after))
    return found


@functools.lru_cache(None)
def _imports(path: Path) -> dict[str, Path]:
    """Return the file that each name is imported from, within the packages."""
    found: dict[str, Path] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        first, _, rest = node.module.partition(".")
        if node.level:
            folder, inner = path.parents[node.level - 1], node.module
        elif first in SOURCES:
            folder, inner = SOURCES[first], rest
        else:
            continue
        file = _module_file(folder, inner.replace(".", "/")) if inner else folder / "__init__.py"
        found.update((alias.asname or alias.name, file) for alias in node.names)
    return found


def _defined(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Return the names that a statement defines, each with the heading that lists it."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name, "Functions"
    elif isinstance(node, ast.ClassDef):
        is_error = node.name.endswith(("Error", "Warning"))
        yield node.name, "Errors and warnings" if is_error else "Classes"
    elif isinstance(node, ast.Assign):
        yield from ((ast.unparse(target), "Constants") for target in node.targets)
    elif isinstance(node, ast.AnnAssign) and node.value:
        yield ast.unparse(node.target), "Constants"


def _first_sentence(node: ast.stmt, after: ast.stmt | None) -> str:
    """Return the first sentence of a docstring, or of the string below a constant."""
    text = ""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        text = ast.get_docstring(node) or ""
    elif isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        text = str(after.value.value)
    paragraph = " ".join(text.split("\n\n")[0].split())
    first = re.split(r"(?<=[.!?])\s", paragraph)[0]
    return first.replace("|", r"\|")


def ordered_names(package: str, main: Sequence[str] = ()) -> dict[str, list[str]]:
    """Sort public names by heading: main ones as listed, functions, classes, others, submodules."""
    names = public_names(package)
    if unknown := [name for name in main if name not in names]:
        raise LookupError(f"pages: {', '.join(unknown)} of {package} is no public name.")
    groups = {"Main": list(main), "Functions": [], "Classes": []}
    groups |= {"Constants": [], "Errors and warnings": []}
    for name in names:
        if name not in main:
            groups.setdefault(definition(package, name).kind, []).append(name)
    return {heading: found for heading, found in groups.items() if found}


def messages(package: str) -> list[Message]:
    """Return every sentence that begins with the package's name and a function, sorted.

    Includes torch's messages that the drop-in names keep, which begin differently.
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
    """Return every string, with a placeholder for each inserted value."""
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
    """Return one mkdocstrings entry with a heading and a link to the source."""
    found = definition(package, name)
    shown = f"`{found.path}`, line {found.line}"
    if repository:
        shown = f"[{shown}]({repository.rstrip('/')}/blob/main/{found.path}#L{found.line})"
    return f"::: {package}.{name}\n\nSource: {shown}\n"


def names_page(package: str, main: Sequence[str] = (), repository: str = "") -> str:
    """Return a table of the public names, and an entry for each in the same order."""
    groups = ordered_names(package, main)
    lines = ["| name | |", "|---|---|"]
    for heading, names in groups.items():
        lines += [f"| **{heading}** | |"]
        for name in names:
            lines += [f"| [`{name}`](#{package}.{name}) | {definition(package, name).summary} |"]
    entries = (_entry(package, name, repository) for names in groups.values() for name in names)
    return "\n".join([*lines, "", *entries])


def messages_page(package: str) -> str:
    """Return the list of messages, each with its last sentence as the next step."""
    rows = (f"- `{text.replace('`', chr(39))}` ({place})" for text, place in messages(package))
    return "\n".join(rows)


def changes(folder: str) -> str:
    """Return a changelog without its title, with headings one level lower."""
    text = (ROOT / folder / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.sub(r"^(#+ )", r"#\1", text.partition("\n")[2].strip(), flags=re.MULTILINE)


# Pages of the site for files that the README links to.
PLACES = [
    (r"docs/examples/\w+\.py", "examples.md"),
    (r"docs/$", "examples.md"),
    (r"docs/(.+)", r"\1"),
    (r"conformance/README\.md", "conformance/index.md"),
    (r"packages/([\w-]+)/README\.md", r"\1/manual.md"),
]


def readme(repository: str = "", folder: str = ".") -> str:
    """Return a README with the site's links; other files need the repository's address.

    A package's page is in a subfolder of the site, so its links start one level up.
    """
    up = "" if folder == "." else "../"

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, mark, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(folder, path)).replace(os.sep, "/")
        if target.endswith("/"):
            path += "/"
        for pattern, place in PLACES:
            if re.fullmatch(pattern, path):
                return f"[{text}]({up}{re.sub(pattern, place, path)}{mark}{anchor})"
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path})" if repository else text

    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", link, text)


CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
TABLE = re.compile(r"^(\|.*\|)\n(\|[-:| ]+\|)\n((?:\|.*\|(?:\n|$))+)", re.MULTILINE)
NUMBER = re.compile(r"[-+<>=~≤≥ ]*\d[\d,.]*(?: ?(?:%|x|to|ms|us|s|MiB|GiB|KiB|[\d,.]+))*")


def tables(markdown: str) -> str:
    """Align columns of numbers to the right, and write bars inside of code as GitHub shows them."""

    def bars(found: re.Match[str]) -> str:
        return f"<code>{escape(found[1].replace(BAR, '|')).replace('|', '&#124;')}</code>"

    def aligned(found: re.Match[str]) -> str:
        header, rule, body = found.groups()
        rows = [_cells(line) for line in body.splitlines()]
        columns = _cells(rule)
        for index, dashes in enumerate(columns):
            values = [row[index].strip() for row in rows if index < len(row)]
            values = [value.replace("**", "") for value in values if value]
            if values and ":" not in dashes and all(map(NUMBER.fullmatch, values)):
                columns[index] = dashes.rstrip() + ":"
        return f"{header}\n|{'|'.join(columns)}|\n{body}"

    return TABLE.sub(lambda found: CODE_WITH_BAR.sub(bars, aligned(found)), markdown)


BAR = "\\|"


def _cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line.strip()[1:-1])


def on_page_markdown(markdown: str, *, config: Any, **rest: Any) -> str:
    """Called by mkdocs for each page."""
    address = config.get("repo_url") or ""
    if "<!-- README.md -->" in markdown:
        markdown = markdown.replace("<!-- README.md -->", readme(address))
    fillers = {
        r"README of ([\w/-]+)": lambda found: readme(address, found[1]),
        r"names of (\w+)(?:: ([\w, ]+))?": lambda found: names_page(
            found[1], found[2].split(", ") if found[2] else (), address
        ),
        r"messages of (\w+)": lambda found: messages_page(found[1]),
        r"changes of ([\w/-]+)": lambda found: changes(found[1]),
    }
    for line, fill in fillers.items():
        markdown = re.sub(rf"^<!-- {line} -->$", fill, markdown, flags=re.MULTILINE)
    return tables(markdown)
