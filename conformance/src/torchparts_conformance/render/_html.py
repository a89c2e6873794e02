"""The matrix as one self-contained page that runs no code but its own filter.

Rule 1: the template escapes every word; what is not to be is the page's own style and script.
Rule 2: the page asks for nothing from anywhere; its policy allows only its own style and script,
by their hashes, so that a mistake against rule 1 would still execute nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchparts_conformance.render._matrix import (
    NOT_RUN,
    NOTHING_SEEN,
    SIGNS,
    Cell,
    Matrix,
    profiles,
)
from torchparts_conformance.report import _outcomes
from torchparts_conformance.requirements._areas import AREAS, LEVELS
from torchparts_conformance.requirements._cases import Case
from torchparts_conformance.requirements._traceability import source_of

_HERE = Path(__file__).parent
# Red is for what was seen to be wrong; whatever nobody saw is grey.
_KINDS = {
    **{outcome: "bad" for outcome in SIGNS if outcome not in NOTHING_SEEN},
    "pass": "good",
    "xfail": "unknown",
    _outcomes.CONFORMANT: "good",
    _outcomes.NOT_CONFORMANT: "bad",
}


def to_html(matrix: Matrix, cases: Mapping[str, Sequence[Case]]) -> str:
    """Write the matrix as a page; `cases` gives the cases of each requirement."""
    # Only a page needs them, and they take a tenth of a second.
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style, script, template = (
        (_HERE / f"matrix.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js", "html.jinja")
    )
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(template).render(
        matrix=matrix,
        profiles=profiles(matrix),
        cases=cases,
        sources={r.id: source for r in matrix.requirements if (source := source_of(r))},
        kinds=_KINDS,
        not_run=NOT_RUN,
        unknown=Cell("not_run", SIGNS["not_run"]),
        areas=[(area, area) for area in AREAS],
        levels=[(level, level) for level in LEVELS],
        columns=[(c.name, c.name) for c in matrix.columns],
        signs=[("bad", "fail, error or xpass"), *SIGNS.items()],
        style=Markup(style),
        script=Markup(script),
        policy=(
            "default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
        ),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
