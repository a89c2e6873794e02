"""Make the site's search work without a server, for pages opened from a folder.

`mkdocs.yml` names this file as a hook. Browsers refuse to fetch files next to a page that is opened
from a folder, but they do load scripts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def on_post_build(*, config: Any, **rest: Any) -> None:
    """Write the search index and the search worker as scripts; mkdocs calls this at the end."""
    site = Path(config["site_dir"])
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    (site / "search/search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    text = json.dumps(worker.read_text(encoding="utf-8"))
    (site / "search/search_worker.js").write_text(f"var searchWorker = {text}", encoding="utf-8")
