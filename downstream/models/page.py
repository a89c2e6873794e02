"""The page of models from their results: `page.py RESULTS.json PAGE.md`."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

# Why a cell is not equal, where that is known: its part, what is said of it, and the cause.
CAUSES = [
    (
        r"the library's own",
        r"num_batches_tracked|running_(mean|var)",
        "The forward runs twice, and batch norm moves its averages in both; loss and gradients "
        "are equal.",
    ),
    (
        r"the library's own",
        r"not support",
        "The library has none for this model.",
    ),
    (
        r"two ranks",
        r"only a call of unit .* makes it whole",
        "The model calls a module inside its first block (`transformer_blocks[0].norm1.emb`) while "
        "the block is sharded; FSDP2 refuses the same.",
    ),
]
UNKNOWN = "The cause is not known yet."
TABLES = {
    "ckpt-wrap, compared with the library's own gradient checkpointing": (
        "the library's own",
        "in place",
        "nested",
        "offload",
    ),
    "sac-policies": (
        *("recipe, nothing kept", "recipe, products kept"),
        *("contexts, nothing kept", "contexts, products kept"),
        *("auto, nothing kept", "auto, products kept", "solve", "fit_"),
    ),
    "mod-tracker and flat-param": ("names", "reports", "flatten", "two ranks"),
}
INTRODUCTION = """\
---
search:
  boost: 2
---

# Models

{models} models of {libraries}, made small, with random weights, and with dropout wherever a \
model has it. Each runs with every part, one at a time, and is compared with a plain copy.
`nox -s models` runs them and writes this page, once a week and before a release.

{equal} of {cells} cells are equal to the last bit: loss, gradients, parameters and buffers.
{others}

{versions}; {machine}; {date}.

Batches are {copies} times as large as in [downstream](downstream.md), which uses the same models \
in other ways; caches of keys and values are off.

## How to read the tables

A percentage is the memory alive between forward and backward, relative to the plain model.
A part's own bookkeeping weighs more in models this small than in full-size ones.
A cell without a note is equal to the last bit in each of two steps; a number in brackets is a \
[note](#notes).

- *names*: the tracker names the same modules as forward hooks see, in the same order.
- *reports*: no report changes a bit, and FLOPs equal those that torch counts.
- *flatten*: with tied embeddings, three steps of AdamW, compared with the plain model.
- *two ranks*: three steps of AdamW, sharded by block, compared with DDP; each rank has its own \
batch.
"""
WRITTEN = """\
## What had to be written

No model was changed for any of these. The lines below are what was run, after the imports; \
`blocks` are the modules of the classes in the [last table](#the-models). A library's own \
checkpointing chooses for itself, and may choose larger ones.
"""


def share(cell: dict[str, Any], plain_bytes: int) -> str:
    """What a cell keeps, in percent of the plain model's."""
    return f"{100 * cell['kept_bytes'] / plain_bytes:.0f}%" if "kept_bytes" in cell else ""


def said(cell: dict[str, Any]) -> str:
    """What a note says of a cell."""
    if cell["outcome"] == "differs":
        return f"differs in `{cell['where']}`, by {cell['by']:.1e} of its largest value"
    return f"{cell['outcome']} `` {cell['error']} ``"


def cause(part: str, text: str) -> str:
    """Why, as far as it is known."""
    found = (why for of, what, why in CAUSES if re.search(of, part) and re.search(what, text))
    return next(found, UNKNOWN)


def row(values: list[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(values)} |"


def code(text: str) -> str:
    """Code in a cell of a table, each line on its own."""
    lines = text.splitlines()
    indents = ("\u00a0" * (len(line) - len(line.lstrip())) for line in lines)
    return "<br>".join(f"{i}`{line.strip()}`" for i, line in zip(indents, lines, strict=True))


def written(result: dict[str, Any]) -> list[str]:
    """What a user writes: for each part, and for each library."""
    lines = [WRITTEN, row(["part", "of", "written"]), "|---|---|---|"]
    for part in result["parts"]:
        inside = textwrap.indent(part["code"], "    ")
        loop = f"for block in blocks:\n{inside}" if part["each_block"] else part["code"]
        own = "<br>".join(f"{name}: `{text}`" for name, text in result["own"].items())
        text = own if part["code"] == "OWN" else code(loop)
        lines.append(row([part["name"], part["package"], text or "nothing"]))
    return lines


def models(result: dict[str, Any], cells: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """What the models are, and how their blocks are found."""
    head = ["model", "class", "parameters", "blocks", "their classes", "tied names"]
    lines = ["## The models", "", row(head), "|---|---|---|---|---|---|"]
    for model in result["models"]:
        tied = cells[model["name"], "flatten"].get("tied", "")
        classes = ", ".join(f"`{name}`" for name in model["block_classes"])
        kind = f"{model['library']} `{model['class']}`"
        numbers = [f"{model['parameters']:,}", str(model["blocks"]), classes, str(tied)]
        lines.append(row([model["name"], kind, *numbers]))
    return lines


def page(result: dict[str, Any]) -> str:
    """The whole page, in Markdown."""
    cells = {(cell["model"], cell["part"]): cell for cell in result["cells"]}
    names = [model["name"] for model in result["models"]]
    plain = {name: cells[name, "plain"]["kept_bytes"] for name in names}
    count = Counter(cell["outcome"] for cell in cells.values())
    others = [f"{number} {outcome}" for outcome, number in count.items() if outcome != "equal"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    libraries = sorted({model["library"] for model in result["models"]})
    introduction = INTRODUCTION.format(
        models=len(names),
        libraries=", ".join(libraries[:-1]) + " and " + libraries[-1],
        equal=count["equal"],
        cells=len(cells),
        others=f"Of the others, each has a [note](#notes): {', '.join(others)}." * bool(others),
        versions=versions[0].upper() + versions[1:],
        **{key: result[key] for key in ("machine", "date", "copies")},
    )
    lines, notes = [introduction], {}
    for title, parts in TABLES.items():
        first = [] if "names" in parts else ["plain, KiB"]
        lines += [f"## {title[0]}{title[1:]}", "", row(["model", *first, *parts])]
        lines.append(row(["---"] * (1 + len(first) + len(parts))))
        for name in names:
            values = [f"{plain[name] / 1024:.0f}" for _ in first]
            for part in parts:
                cell = cells[name, part]
                text = share(cell, plain[name]) or ("equal" if cell["outcome"] == "equal" else "")
                if cell["outcome"] != "equal":
                    number = notes.setdefault((part, name), len(notes) + 1)
                    text = f"{text} {cell['outcome']} [{number}]".strip()
                values.append(text)
            lines.append(row([name, *values]))
        lines.append("")
    lines += [*written(result), "", *models(result, cells), ""]
    lines += ["## Notes", ""] if notes else []
    for (part, name), number in notes.items():
        text = said(cells[name, part])
        lines.append(f"{number}. {name}, {part}: {text}. {cause(part, text)}")
    return "\n".join(lines).rstrip() + "\n"


def unexplained(result: dict[str, Any]) -> list[str]:
    """Cells of our own that are not equal, and nobody knows why."""
    ours = {part["name"] for part in result["parts"] if part["package"] != "torch"}
    wrong = (c for c in result["cells"] if c["part"] in ours and c["outcome"] != "equal")
    said_of = ((cell, said(cell)) for cell in wrong)
    return [
        f"{cell['model']}, {cell['part']}: {text}"
        for cell, text in said_of
        if cause(cell["part"], text) == UNKNOWN
    ]


def main(results: str, path: str) -> int:
    """Write the page; 1 if one of our own cells is not equal and nobody knows why."""
    result = json.loads(Path(results).read_text(encoding="utf-8"))
    Path(path).write_text(page(result), encoding="utf-8")
    for line in unexplained(result):
        print(line)
    return int(bool(unexplained(result)))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
