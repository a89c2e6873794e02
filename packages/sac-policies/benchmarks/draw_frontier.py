"""Draw what `bench_frontier.py` has written, and write its tables into the page.

    python packages/sac-policies/benchmarks/draw_frontier.py docs/benchmarks

The folder has `frontier.json` (blocks) and `frontier-models.json`; it gets `frontier.svg`, and the
tables of its page between marks. Needs the standard library only; the same numbers always give
the same files.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PAGE = "frontier_cpu_2026-11_torchparts.md"
# On a phone a chart is 370 pixels wide, and labels of 14 are 10 there.
WIDE, HIGH, LEFT, LEGEND, GAP = 520, 220, 50, 90, 76
LEAST_TIME, MOST_TIME, TICKS = 0.9, 1.7, (1.0, 1.2, 1.4, 1.6)
KINDS = {
    "sac-policies, solve": "solve",
    "sac-policies, by operator": "ours",
    "sac-policies, fit_": "fit",
    "sac-policies, fit_ of kept bytes": "kept",
    "torch, every k-th block": "every",
    "torch, selective": "selective",
    "torch, compiled budget": "compiled",
}
"""Way to its class in the style; in the order of the legend."""
STYLE = """
  text { font: 15px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 17px }
  .small { fill: #666; font-size: 14px } line { stroke: #ddd } polyline { fill: none }
  .solve { fill: #3f51b5 } polyline.solve { fill: none; stroke: #3f51b5; stroke-width: 2 }
  .ours { fill: #00897b } .fit { fill: #f9a825 } .kept { fill: #8e24aa }
  polyline.kept { fill: none; stroke: #8e24aa; stroke-width: 2 } .every { fill: #8d6e63 }
  .selective { fill: #c62828 }
  polyline.every { stroke: #8d6e63; stroke-width: 2 } .compiled { fill: #9e9e9e }
  polyline.compiled { stroke: #9e9e9e; stroke-width: 1.5; stroke-dasharray: 4 3 }
  polyline.every, polyline.compiled { fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .small { fill: #aaa } line { stroke: #444 } .solve { fill: #7986cb }
    polyline.solve { stroke: #7986cb } .ours { fill: #4db6ac } .fit { fill: #fdd835 }
    .kept { fill: #ce93d8 } polyline.kept { fill: none; stroke: #ce93d8 } .every { fill: #bcaaa4 }
    polyline.every { stroke: #bcaaa4 } .selective { fill: #ef9a9a }
  }
"""


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    """One line of text."""
    name = f' class="{kind}"' if kind else ""
    return f'  <text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{escape(said)}</text>'


def middle(times: list[float]) -> float:
    """The time of a point: between its runs."""
    return sum(times) / len(times)


def panel(kind: dict[str, Any], top: float) -> list[str]:
    """The front of one kind of block: bytes to the right, time upwards."""
    most, wide = max(row["bytes"] for row in kind["rows"]), WIDE - LEFT - 24

    def x(size: int) -> float:
        return LEFT + wide * size / most

    def y(ratio: float) -> float:
        held = min(max(ratio, LEAST_TIME), MOST_TIME)
        return top + HIGH * (MOST_TIME - held) / (MOST_TIME - LEAST_TIME)

    parts = [text(LEFT, top - 12, f"{kind['block']}: {most / 2**20:.1f} MiB kept by none")]
    for tick in TICKS:
        parts.append(
            f'  <line x1="{LEFT:g}" x2="{LEFT + wide:g}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        parts.append(text(LEFT - 8, y(tick) + 4, f"{tick:g}", "small", "end"))
    for share in (0, 50, 100):
        parts.append(text(x(most * share // 100), top + HIGH + 18, f"{share}%", "small", "middle"))
    for way, name in KINDS.items():
        rows = sorted(
            (row for row in kind["rows"] if row["way"] == way), key=lambda row: row["bytes"]
        )
        if len(rows) > 2 and name != "fit":
            line = " ".join(f"{x(row['bytes']):.1f},{y(middle(row['time'])):.1f}" for row in rows)
            parts.append(f'  <polyline class="{name}" points="{line}"/>')
        parts += [
            f'  <circle class="{name}" cx="{x(row["bytes"]):.1f}" '
            f'cy="{y(middle(row["time"])):.1f}" r="3.5"/>'
            for row in rows
        ]
    return parts


def draw(result: dict[str, Any]) -> str:
    """The chart as SVG, a panel for each kind of block."""
    title = "A step's time, by the bytes kept for backward"
    under = (
        "over a step without checkpointing;",
        f"{result['count']} blocks on a CPU, torch {result['torch']}, runs: {result['runs']}",
    )
    body = []
    for number, (way, name) in enumerate(KINDS.items()):
        at, y = 10 + number % 2 * 255, LEGEND + number // 2 * 20
        body.append(f'  <circle class="{name}" cx="{at + 5}" cy="{y}" r="4"/>')
        body.append(text(at + 14, y + 5, way, "small"))
    top = LEGEND + (len(KINDS) + 1) // 2 * 20 + 26
    for number, kind in enumerate(result["blocks"]):
        body += panel(kind, top + number * (HIGH + GAP))
    high = top + len(result["blocks"]) * (HIGH + GAP) - 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{high}" '
            f'viewBox="0 0 {WIDE} {high}" role="img">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{STYLE}  </style>",
            text(10, 24, title, "title"),
            *(text(10, 44 + 18 * n, line, "small") for n, line in enumerate(under)),
            *body,
            "</svg>",
            "",
        ]
    )


def _times(several: list[float]) -> str:
    low, high = f"{min(several):.2f}", f"{max(several):.2f}"
    return low if low == high else f"{low} to {high}"


def blocks_table(result: dict[str, Any]) -> list[str]:
    """Bytes and time of the ends of each front."""
    wanted = (
        ("torch, every k-th block", str(result["count"]), "full checkpointing"),
        ("sac-policies, by operator", "nothing", "nothing kept"),
        ("torch, selective", "products", "torch, products kept"),
        ("sac-policies, by operator", "products", "products kept"),
    )
    lines = [
        f"| block | none, MiB | {' | '.join(said for *_, said in wanted)} |",
        "|---" * (2 + len(wanted)) + "|",
    ]
    for kind in result["blocks"]:
        rows = {(row["way"], row["asked"]): row for row in kind["rows"]}
        cells = [f"{rows['none', '']['bytes'] / 2**20:.2f}"]
        for way, asked, _ in wanted:
            row = rows[way, asked]
            cells.append(f"{row['bytes'] / 2**20:.2f}, {_times(row['time'])}x")
        lines.append(f"| {kind['block']} | {' | '.join(cells)} |")
    return lines


def ahead(kind: dict[str, Any], way: str) -> list[tuple[str, float, float]]:
    """By budget: the time of a way, and the best of torch's ways with no more bytes."""
    own = [row for row in kind["rows"] if row["way"] == way]
    others = [row for row in kind["rows"] if row["way"].startswith("torch, ")]
    found = []
    for row in own:
        fit = [middle(other["time"]) for other in others if other["bytes"] <= row["bytes"]]
        found.append((row["asked"], middle(row["time"]), min(fit, default=float("nan"))))
    return found


def budgets_table(result: dict[str, Any], way: str) -> list[str]:
    """At each budget: the time of a way, and torch's with no more bytes; nothing without any."""
    times = {kind["block"]: ahead(kind, way) for kind in result["blocks"]}
    asked = list(dict.fromkeys(budget for found in times.values() for budget, *_ in found))
    asked.sort(key=lambda budget: int(budget.rstrip("%")))
    if not asked:
        return []
    lines = [f"| block | {' | '.join(asked)} |", "|---" * (1 + len(asked)) + "|"]
    for block, found in times.items():
        cells = {
            budget: f"{ours:.2f} / {'-' if theirs != theirs else f'{theirs:.2f}'}"
            for budget, ours, theirs in found
        }
        lines.append(f"| {block} | {' | '.join(cells.get(b, '-') for b in asked)} |")
    return lines


def at_peaks(kind: dict[str, Any]) -> list[tuple[str, float, float]]:
    """By way of torch's: the time of `fit_` with the memory that it takes, and its own."""
    rows = {(row["way"], row["asked"]): row for row in kind["rows"]}
    return [
        (asked, middle(row["time"]), middle(rows[torchs, asked]["time"]))
        for (way, asked), row in rows.items()
        for torchs in ("torch, every k-th block", "torch, selective")
        if way == "sac-policies, fit_" and (torchs, asked) in rows
    ]


def peaks_table(result: dict[str, Any]) -> list[str]:
    """At the peak of each of torch's ways: the time of `fit_`, and torch's."""
    asked = [name for name, *_ in at_peaks(result["blocks"][0])]
    lines = [f"| block | {' | '.join(asked)} |", "|---" * (1 + len(asked)) + "|"]
    for kind in result["blocks"]:
        cells = (f"{ours:.2f} / {theirs:.2f}" for _, ours, theirs in at_peaks(kind))
        lines.append(f"| {kind['block']} | {' | '.join(cells)} |")
    return lines


def predicted_table(result: dict[str, Any]) -> list[str]:
    """The most by which predicted peaks were off, and how many there were."""
    rows = result["models"]
    budgets = [each["off"] for row in rows for each in row["budgets"].values() if each["fits"]]
    told = [row["foretold"] for row in rows]
    lines = ["| predicted | peaks | off by at most |", "|---|---|---|"]
    for what, count, offs in (
        ("`fit_`, blocks within a budget", len(budgets), budgets),
        ("`profile_step`, without checkpointing", len(told), [each["plain"] for each in told]),
        (
            "`profile_step`, plans for the whole model",
            sum(each["plans"] for each in told),
            [each["worst"] for each in told],
        ),
    ):
        lines.append(f"| {what} | {count} | {max(map(abs, offs)):.2f}% |")
    return lines


def _budget(found: dict[str, Any]) -> str:
    return f"{found['share']:.0%}" if found["fits"] else "no"


def models_table(result: dict[str, Any]) -> list[str]:
    """Kept bytes and budgets of each model."""
    budgets = list(result["models"][0]["budgets"])
    lines = [
        "| model | none, KiB | full | nothing kept | freed of what full frees "
        f"| torch, products kept | products kept | full, peak | "
        f"{' | '.join(f'fit_ {budget}' for budget in budgets)} |",
        "|---" * (8 + len(budgets)) + "|",
    ]
    for row in result["models"]:
        sizes = {
            way: "raises" if size is None else f"{size / 1024:.0f}"
            for way, size in row["bytes"].items()
        }
        cells = [
            sizes["none"],
            sizes["full"],
            sizes["nothing"],
            f"{row['freed']:.1%}",
            sizes["selective"],
            sizes["products"],
            f"{row['full peak']:.0%}",
            *(_budget(row["budgets"][budget]) for budget in budgets),
        ]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return lines


NAMED = {
    "full": "full",
    "nothing": "nothing kept",
    "selective": "torch, products kept",
    "products": "products kept",
}
"""Way of a model to what it is called in tables; others are called as they are."""


def times_table(result: dict[str, Any]) -> list[str]:
    """A step's time by model and way, over a plain one's; nothing where none were taken."""
    rows = [row for row in result["models"] if "times" in row]
    if not rows:
        return []
    ways = [way for way in rows[0]["times"] if way != "none"]
    lines = [
        f"| model | plain, ms | {' | '.join(NAMED.get(way, way) for way in ways)} |",
        "|---" * (2 + len(ways)) + "|",
    ]
    for row in rows:
        taken = (row["times"][way] for way in ways)
        cells = [_times(row["plain ms"]), *("-" if t is None else _times(t) for t in taken)]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return lines


def over_theirs(result: dict[str, Any], ours: str, theirs: str) -> dict[str, float]:
    """By model: the time of one way over another's, if both can be had, within the same budget."""
    share = int(ours.removeprefix("fit_ ").rstrip("%")) / 100 if ours.startswith("fit_") else 1.0
    found = {}
    for row in result["models"]:
        one, other = (row.get("times", {}).get(way) for way in (ours, theirs))
        if one and other and row.get("full peak", 0.0) <= share:
            found[row["model"]] = middle(one) / middle(other)
    return found


def compared_table(result: dict[str, Any]) -> list[str]:
    """Each way of ours with torch's that it is held against, and where it takes more time."""
    ways = next((row["times"] for row in result["models"] if "times" in row), {})
    lines = []
    for ours in (way for way in ways if way not in ("none", "full", "selective")):
        theirs = "selective" if ours == "products" else "full"
        ratios = over_theirs(result, ours, theirs)
        more = sorted(
            ((ratio, model) for model, ratio in ratios.items() if ratio > 1), reverse=True
        )
        cells = (
            NAMED.get(ours, ours),
            NAMED[theirs],
            f"{statistics.median(ratios.values()):.2f}" if ratios else "-",
            f"{len(ratios) - len(more)} of {len(ratios)}",
            ", ".join(f"{model} {ratio:.3f}" for ratio, model in more) or "none",
        )
        lines.append(f"| {' | '.join(cells)} |")
    head = ["| ours | torch's | median of ours over it | not more on | more on |", "|---" * 5 + "|"]
    return [*head, *lines] if lines else []


def page_of(page: str, tables: dict[str, list[str]]) -> str:
    """The page with its tables as they are now, each after its mark."""
    for name, lines in tables.items():
        mark = re.escape(f"<!-- table: {name} -->")
        table = "".join(f"{line}\n" for line in lines).replace("\\", r"\\")
        page, count = re.subn(rf"({mark}\n\n)(?:\|.*\n)*\n?", rf"\g<1>{table}\n", page)
        if count != 1:
            raise SystemExit(f"the page has {count} marks for the table {name!r}; it needs one")
    return page


def main(folder: Path) -> dict[Path, str]:
    """What the files of the folder are to be."""
    blocks, models = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("frontier.json", "frontier-models.json")
    )
    page = folder / PAGE
    tables = {
        "blocks": blocks_table(blocks),
        "budgets": budgets_table(blocks, "sac-policies, solve"),
        "kept": budgets_table(blocks, "sac-policies, fit_ of kept bytes"),
        "peaks": peaks_table(blocks),
        "models": models_table(models),
        "predicted": predicted_table(models),
        "times": times_table(models),
        "compared": compared_table(models),
    }
    return {
        folder / "frontier.svg": draw(blocks),
        page: page_of(page.read_text(encoding="utf-8"), tables),
    }


if __name__ == "__main__":
    for path, wanted in main(Path(sys.argv[1])).items():
        path.write_text(wanted, encoding="utf-8")
