"""Pages of the conformance suite, generated while mkdocs builds the site.

Requirement pages come from the decorators of the cases, the matrix from `results.json`, and the
list of implementations from its entries. `mkdocs.yml` names this file as a hook.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from torchparts_conformance.listing import _listing
from torchparts_conformance.render import _render, _spec_pages
from torchparts_conformance.report import _results
from torchparts_conformance.requirements._cases import load_registry

FOLDER = "conformance"
MATRIX = f"{FOLDER}/matrix.md"


def matrix_texts(docs: Path) -> tuple[str, str]:
    """Return the matrix as a page with a filter, and as Markdown for the search."""
    registry = load_registry()
    results = _results.read(docs / FOLDER / "results.json")
    return _render.matrix_texts([_results.as_report(result, registry) for result in results])


def pages(docs: Path) -> dict[str, str]:
    """Return every generated page by its path below the folder of the documentation."""
    _, markdown = matrix_texts(docs)
    found = {"matrix.md": markdown, "registry/index.md": _listing.page(docs / FOLDER / "registry")}
    return {f"{FOLDER}/{name}": text for name, text in {**_spec_pages.pages(), **found}.items()}


def body(page: str) -> str:
    """Return the tables, the filter and the script of a matrix page, without head and colours."""
    found = re.search(r"(<h1>.*)(<script>.*</script>)\s*</body>", page, re.DOTALL)
    if found is None or 'document.querySelector("form")' not in found[2]:
        raise ValueError(
            "the page of the matrix has no heading, or no script that looks for its form. Change "
            "tools/site/conformance.py as render/matrix.html.jinja was changed."
        )
    script = found[2].replace('querySelector("form")', 'querySelector(".matrix form")')
    return f'<div class="matrix">{found[1]}</div>{script}'


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages; mkdocs calls this before it reads any page."""
    for path, text in pages(Path(config["docs_dir"])).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give the matrix the room of the table of contents."""
    if page.file.src_uri == MATRIX:
        page.meta["hide"] = ["toc"]
    return markdown


def on_page_content(html: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the tables of the matrix by those with a filter."""
    if page.file.src_uri != MATRIX:
        return html
    return body(matrix_texts(Path(config["docs_dir"]))[0])
