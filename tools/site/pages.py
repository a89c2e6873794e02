"""Fill pages from the repository when mkdocs builds the site.

`mkdocs.yml` names this file as a hook. It replaces these lines of a page:

- `<!-- README.md -->`: the README, with links that work on the site.
- `<!-- names of ckpt_wrap -->`: one API entry for each name of the package's `__all__`.
- `<!-- messages of ckpt_wrap -->`: the errors and warnings of the package.
- `<!-- changes of packages/ckpt-wrap -->`: the package's changelog.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
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


SUBMODULES = {"sac_policies": ("budget", "policies", "reports")}
"""Modules of a package whose names are public, too."""


@functools.lru_cache(None)
def public_names(package: str) -> list[str]:
    """The package's `__all__`, without what is no interface, and that of its public modules."""
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
    """Where a public name is defined."""
    name = name.rpartition(".")[2]
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
    """A changelog without its title, with headings one level lower."""
    text = (ROOT / folder / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.sub(r"^(#+ )", r"#\1", text.partition("\n")[2].strip(), flags=re.MULTILINE)


# Where the site shows a file that the README links to.
PLACES = [
    (r"docs/examples/\w+\.py", "examples.md"),
    (r"docs/$", "examples.md"),
    (r"docs/(.+)", r"\1"),
    (r"conformance/README\.md", "conformance/index.md"),
    (r"packages/([\w-]+)/README\.md", r"\1/tutorial.md"),
]


def readme(repository: str = "") -> str:
    """The README with the site's links; other files of the repository need its address."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        for pattern, place in PLACES:
            path, mark, anchor = target.partition("#")
            if re.fullmatch(pattern, path):
                return f"[{text}]({re.sub(pattern, place, path)}{mark}{anchor})"
        return f"[{text}]({repository.rstrip('/')}/blob/main/{target})" if repository else text

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", link, text)


def on_page_markdown(markdown: str, *, config: Any, **rest: Any) -> str:
    """Called by mkdocs for each page."""
    address = config.get("repo_url") or ""
    if "<!-- README.md -->" in markdown:
        markdown = markdown.replace("<!-- README.md -->", readme(address))
    if address:
        markdown = re.sub(r"(git clone |git\+)ADDRESS", rf"\g<1>{address}", markdown)
        markdown = markdown.replace("  # ADDRESS is that of this repository", "")
    fillers = {
        r"names of (\w+)": lambda found: names_page(found[1], address),
        r"messages of (\w+)": lambda found: messages_page(found[1]),
        r"changes of ([\w/-]+)": lambda found: changes(found[1]),
    }
    for line, fill in fillers.items():
        markdown = re.sub(rf"^<!-- {line} -->$", fill, markdown, flags=re.MULTILINE)
    return markdown
