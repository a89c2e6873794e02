"""Generate the pages of the conformance suite when mkdocs builds the site.

Requirement pages come from the decorators of the cases, and the results page from `results.json`.
`mkdocs.yml` names this file as a hook.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from torchparts_conformance import _pages, _results

FOLDER = "conformance"
DATE = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)\b")
LONG_NAME = re.compile(r"\b(?:[A-Z][a-z]+){3,}\b")


def pages(docs: Path) -> dict[str, str]:
    """Return every generated page by its path below the docs folder."""
    results = _results.read(docs / FOLDER / "results.json")
    # On a phone, a table divides dates unless their hyphens are non-breaking, and a long name
    # only where it is allowed to.
    text = DATE.sub("\\1\u2011\\2\u2011\\3", _pages.results_page(results))
    found = {"results.md": LONG_NAME.sub(_divisible, text)}
    return {f"{FOLDER}/{name}": text for name, text in (found | _pages.requirement_pages()).items()}


def _divisible(name: re.Match[str]) -> str:
    """Return a CamelCase name that may be divided before each capital."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", name[0])


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages; mkdocs calls this before it reads any page."""
    for path, text in pages(Path(config["docs_dir"])).items():
        files.append(File.generated(config, path, content=text))
    return files
