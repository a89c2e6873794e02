"""What the site has beyond its pages: the matrix to filter, and a search that needs no server.

`mkdocs.yml` names this file as a hook. The matrix is the one that the conformance suite wrote,
`docs/conformance/matrix.html`, put into the site's own page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MATRIX = "conformance/matrix.md"


def matrix(written: str) -> str:
    """The tables, filter and script of the suite's page, without its head and its own colours."""
    body = re.search(r"(<h1>.*)(<script>.*</script>)\s*</body>", written, re.DOTALL)
    if body is None or 'document.querySelector("form")' not in body[2]:
        raise ValueError(
            "whole_site: matrix.html has no heading, or no script that asks for its form; "
            "follow its new shape in .ci/whole_site.py."
        )
    script = body[2].replace('querySelector("form")', 'querySelector(".matrix form")')
    return f'<div class="matrix">{body[1]}</div>{script}'


def on_page_markdown(markdown: str, *, page: Any, **rest: Any) -> str:
    """Called by mkdocs for each page: the matrix takes the room of the table of contents."""
    if page.file.src_uri == MATRIX:
        page.meta["hide"] = ["toc"]
    return markdown


def on_page_content(html: str, *, page: Any, config: Any, **rest: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    if page.file.src_uri != MATRIX:
        return html
    written = Path(config["docs_dir"], MATRIX).with_suffix(".html")
    return matrix(written.read_text(encoding="utf-8"))


def on_post_build(*, config: Any, **rest: Any) -> None:
    """Called by mkdocs at the end: the index and the worker of the search as scripts, too."""
    site = Path(config["site_dir"])
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    (site / "search/search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    text = json.dumps(worker.read_text(encoding="utf-8"))
    (site / "search/search_worker.js").write_text(f"var searchWorker = {text}", encoding="utf-8")
