"""Results as JSON, as Markdown tables and as a figure."""

from __future__ import annotations

import importlib
import math
import platform
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .figure import Panel, Point, draw
from .jobs import RUNS_ONCE, Job
from .measuring import LEAK_FRACTION, MIB, Row
from .ways import GROUPS

OURS = ("checkpoint_*", "offload_", "sac_policies *", "fit_ *", "compiled sac_policies *")
COLUMNS = ("way", "ms", "over", "tokens/s", "peak MiB", "over", "kept MiB", "gradients", "note")


@dataclass
class Run:
    """The results of all ways of one job."""

    job: Job
    parameters: int
    parameter_bytes: int
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Return the run as values for JSON."""
        return {
            "model": self.job.name,
            "parameters": self.parameters,
            "dtype": str(self.job.shape.dtype).removeprefix("torch."),
            "optimizer": "AdamW with learning rate 0" if self.job.shape.optimizer else None,
            "sequences": self.job.batch[0],
            "tokens_each": self.job.batch[1],
            "rounds": self.job.rounds,
            "ways": self.entries(),
        }

    def entries(self) -> list[dict[str, Any]]:
        """Return one dict for each way, with everything in the table and more."""
        entries: list[dict[str, Any]] = []
        first: dict[str, Row] = {}
        for row in self.rows:
            base = first.setdefault(row.group, row)
            entry = {"way": row.name, "group": row.group, "error": row.error, "note": row.note}
            if row.ms is not None and row.peak_bytes is not None:
                entry |= {
                    "ms": round(row.ms, 2),
                    "ms_over": ratio(row.ms, base.ms),
                    "ms_fastest": round(min(row.seconds) * 1e3, 2),
                    "ms_all": [round(one * 1e3, 2) for one in row.seconds],
                    "tokens_per_second": round(math.prod(self.job.batch) / row.ms * 1e3),
                    "peak_mib": round(row.peak_bytes / MIB, 2),
                    "peak_over": ratio(row.peak_bytes, base.peak_bytes),
                    "kept_mib": round(row.kept_bytes / MIB, 2),
                    "held_mib": round(row.held_bytes / MIB, 2),
                    "leaked_mib": round(row.leaked_bytes / MIB, 2),
                    "leaks": row.leaked_bytes > LEAK_FRACTION * self.parameter_bytes,
                    "gradients": row.gradients,
                    "gradients_off": row.gradients_off,
                }
            if row.optimizer_seconds:
                alone = statistics.median(row.optimizer_seconds) * 1e3
                entry["optimizer_ms"] = round(alone, 2)
            entries.append(entry)
        return entries


def ratio(value: float, base: float | None) -> float | None:
    """Format a ratio."""
    return round(value / base, 2) if base else None


def cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return one line of the table."""
    if entry["error"]:
        return (entry["way"], *[""] * 7, f"cannot run: {entry['error']}")
    if "ms" not in entry:
        return (entry["way"], *[""] * 7, "not timed")
    off = entry["gradients_off"]
    notes = [entry["note"]]
    if "optimizer_ms" in entry:
        notes.append(f"optimizer alone {entry['optimizer_ms']} ms")
    if entry["leaks"]:
        notes.append(f"leaks {entry['leaked_mib']} MiB")
    return (
        entry["way"],
        f"{entry['ms']:,}",
        f"{entry['ms_over']}",
        f"{entry['tokens_per_second']:,}",
        f"{entry['peak_mib']:,}",
        f"{entry['peak_over']}",
        f"{entry['kept_mib']:,}",
        entry["gradients"] if off is None else f"off by {off:.1e}",
        "; ".join(filter(None, notes)),
    )


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, with a heading for each group."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    groups: list[str] = []
    for entry in entries:
        if entry["group"] not in groups:
            groups.append(entry["group"])
            heading = f"**{entry['group']}**: {GROUPS[entry['group']]}"
            lines.append((heading, *[""] * (len(COLUMNS) - 1)))
        lines.append(cells(entry))
    widths = [max(len(line[i]) for line in lines[1:] if line[1] or i == 0) for i in range(8)]
    widths = [max(width, len(title)) for width, title in zip(widths, COLUMNS, strict=False)]

    def shown(line: tuple[str, ...]) -> str:
        padded = [line[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(line[1:8], widths[1:], strict=True)]
        return f"| {' | '.join([*padded, line[8]])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:]), "---"])
    return "\n".join([shown(lines[0]), f"|{rule}|", *map(shown, lines[1:])])


def environment(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the figures depend on: card, versions, date."""
    libraries = {}
    for name in ("torch", "transformers", "trl", "torch_remat"):
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = None
    for name in ("ckpt_wrap", "flat_param", "mod_tracker", "sac_policies"):
        try:
            libraries[name] = importlib.import_module(name).__version__
        except ImportError:
            libraries[name] = None
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device_name(device),
        "python": platform.python_version(),
        "libraries": libraries,
        "command": shlex.join(["python", "-m", "benchmarks.real", *arguments]),
    }


def device_name(device: torch.device) -> str:
    """Return the card's name, or the processor's and the number of threads."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{[*names, platform.machine()][0]}, {torch.get_num_threads()} threads"


def is_one_of(way: str, patterns: Sequence[str]) -> bool:
    """Whether a way has one of these names; `*` matches any text."""
    return any(fnmatchcase(way, one) for one in patterns)


def is_wrong(run: Run, row: Row) -> bool:
    """Whether a way's gradients differ from plain's although they should be equal."""
    exact = {one.name for one in run.job.ways if one.exact}
    if run.job.shape.experts:
        exact = {name for name in exact if is_one_of(name, RUNS_ONCE)}
    return row.gradients == "off" and row.name in exact


def figure(result: dict[str, Any]) -> str:
    """Return an SVG image: tokens per second against the peak, one panel for each run."""
    panels = []
    for run in result["runs"]:
        points = [
            Point(
                entry["way"],
                entry["peak_mib"] / 1024,
                entry["tokens_per_second"],
                is_ours=is_one_of(entry["way"], OURS),
            )
            for entry in run["ways"]
            if "ms" in entry and not entry["error"]
        ]
        tokens = f"{run['sequences']} x {run['tokens_each']:,} tokens"
        size = f"{run['parameters'] / 1e6:,.1f} M parameters, {run['dtype']}"
        panels.append(Panel(f"{run['model']}: {size}, {tokens}", points))
    libraries = result["libraries"]
    about = f"{result['device']}, {result['date'][:10]}, torch {libraries['torch']}"
    if libraries["transformers"]:
        about += f", transformers {libraries['transformers']}"
    return draw("Training steps: tokens per second against peak memory", about, panels)


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    libraries = ", ".join(f"{name} {number}" for name, number in result["libraries"].items())
    llama = "transformers' code" if result["llama"] == "transformers" else "the script's own Llama"
    lines = [
        f"# {', '.join(dict.fromkeys(run['model'] for run in result['runs']))}: {llama}",
        f"{result['date']}, {result['device']}, Python {result['python']}, {libraries}",
        f"`{result['command']}`: {result['seconds']} s",
    ]
    for run in result["runs"]:
        lines.append(
            f"\n## {run['model']}, {run['parameters'] / 1e6:,.1f} M parameters, {run['dtype']}, "
            f"{run['sequences']} x {run['tokens_each']:,} tokens, median of up to "
            f"{run['rounds']} interleaved steps\n"
        )
        lines.append(table(run["ways"]))
    return "\n".join(lines)
