"""The matrix as one self-contained page that runs no code but its own filter.

Rule 1: every word that comes from a report or a requirement is escaped.
Rule 2: the page asks for nothing from anywhere; its policy allows only its own style and script,
by their hashes, so that a mistake against rule 1 would still execute nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from torchparts_conformance.render._matrix import SIGNS, Cell, Column, Matrix, profiles
from torchparts_conformance.requirements._cases import Case
from torchparts_conformance.requirements._registry import AREAS, Requirement
from torchparts_conformance.requirements._traceability import SourceTest

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;color:#1b1b1b;background:#fff}
table{border-collapse:collapse;margin:1rem 0}
th,td{border:1px solid #8a8a8a;padding:.3rem .6rem;text-align:left;vertical-align:top}
thead th{position:sticky;top:0;background:#eee}
td.fail,td.error,td.xpass,td.not_run{background:#fbe3e1;font-weight:bold}
td.pass{background:#e8f4e2}
summary{cursor:pointer}
form{display:flex;gap:1rem;flex-wrap:wrap;align-items:end}
label{display:flex;flex-direction:column}
:focus-visible{outline:3px solid #0b57d0;outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{position:static}
@media (prefers-color-scheme:dark){body{background:#161616;color:#eee}thead th{background:#2b2b2b}
td.fail,td.error,td.xpass,td.not_run{background:#4d1f1c}td.pass{background:#1f3a17}a{color:#9cc2ff}}
"""
_SCRIPT = """
const form = document.querySelector("form");
const rows = [...document.querySelectorAll("#requirements tbody tr")];
function filter() {
  const text = form.text.value.toLowerCase(), area = form.area.value, outcome = form.outcome.value;
  let shown = 0;
  for (const row of rows) {
    const keep = row.textContent.toLowerCase().includes(text)
      && (!area || row.dataset.area === area)
      && (!outcome || row.dataset.outcomes.split(" ").includes(outcome));
    row.hidden = !keep;
    shown += keep;
  }
  document.querySelector("output").value = shown + " of " + rows.length + " requirements";
}
form.addEventListener("input", filter);
form.addEventListener("submit", event => event.preventDefault());
form.text.value = decodeURIComponent(location.hash.slice(1));
filter();
"""


def to_html(
    matrix: Matrix, cases: Mapping[str, Sequence[Case]], sources: Mapping[str, SourceTest]
) -> str:
    """Write the matrix as a page; `cases` and `sources` give each requirement its evidence."""
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(_STYLE)}'; script-src '{_hash(_SCRIPT)}'"
    )
    rows = "".join(_row(matrix, r, cases.get(r.id, ()), sources) for r in matrix.requirements)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>torchparts conformance {escape(matrix.suite)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#requirements">Skip to the requirements</a>\n'
        f"<h1>Conformance, suite {escape(matrix.suite)}</h1>\n"
        f"{_verdicts(matrix)}{_form()}"
        f'<table id="requirements">\n<caption>Requirements</caption>\n'
        f"<thead><tr><th scope=col>requirement</th>{_heads(matrix.columns)}</tr></thead>\n"
        f"<tbody>\n{rows}</tbody>\n</table>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _heads(columns: Iterable[Column]) -> str:
    return "".join(
        f"<th scope=col>{escape(c.title)}<br>{escape(c.device)}<br>torch {escape(c.torch)}</th>"
        for c in columns
    )


def _verdicts(matrix: Matrix) -> str:
    lines = "".join(
        f"<tr><th scope=row>{escape(area)} {escape(profile)}</th>"
        + "".join(
            f"<td>{escape(c.verdicts.get((area, profile), SIGNS['not_run']))}</td>"
            for c in matrix.columns
        )
        + "</tr>\n"
        for area, profile in profiles(matrix)
    )
    return (
        "<table>\n<caption>Verdicts, with MUST requirements passed of all</caption>\n"
        f"<thead><tr><th scope=col>profile</th>{_heads(matrix.columns)}</tr></thead>\n"
        f"<tbody>\n{lines}</tbody>\n</table>\n"
    )


def _form() -> str:
    areas = "".join(f"<option>{area}</option>" for area in AREAS)
    outcomes = "".join(f'<option value="{o}">{escape(s)}</option>' for o, s in SIGNS.items())
    return (
        '<form role="search">\n'
        '<label>Text<input name="text" type="search"></label>\n'
        f'<label>Area<select name="area"><option value="">all</option>{areas}</select></label>\n'
        '<label>Outcome<select name="outcome"><option value="">any</option>'
        f"{outcomes}</select></label>\n<output></output>\n</form>\n"
    )


def _row(
    matrix: Matrix,
    requirement: Requirement,
    cases: Iterable[Case],
    sources: Mapping[str, SourceTest],
) -> str:
    r = requirement
    cells = [c.cells.get(r.id, Cell("not_run", SIGNS["not_run"])) for c in matrix.columns]
    outcomes = " ".join(sorted({cell.outcome for cell in cells}))
    return (
        f'<tr id="{r.id}" data-area="{r.area}" data-outcomes="{outcomes}"><th scope=row><details>'
        f"<summary>{r.id} {r.level} {escape(r.profile)}</summary><p>{escape(r.text)}</p>"
        f"{_evidence(r, cases, sources)}</details></th>{''.join(map(_cell, cells))}</tr>\n"
    )


def _evidence(
    requirement: Requirement, cases: Iterable[Case], sources: Mapping[str, SourceTest]
) -> str:
    source = sources.get(requirement.source)
    name = escape(requirement.source)
    items = [
        f'source test <a href="{escape(source.address)}">{name}</a>' if source else "",
        f"why: {escape(requirement.rationale)}" if requirement.rationale else "",
        *(f"case {escape(case.name)}, line {case.line}: {escape(case.text)}" for case in cases),
    ]
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items if item) + "</ul>"


def _cell(cell: Cell) -> str:
    text, kind = escape(cell.text), escape(cell.outcome)
    if not cell.reason or cell.outcome in ("pass", "not_claimed", "not_provided"):
        return f'<td class="{kind}">{text}</td>'
    why = f"<details><summary>{text}</summary><p>{escape(cell.reason)}</p></details>"
    return f'<td class="{kind}">{why}</td>'
