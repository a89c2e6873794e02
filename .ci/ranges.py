"""Time what pages give as ratios, some times over, and write the least and the most of all runs.

    python .ci/ranges.py              two more runs; minutes, on a machine that does nothing else
    python .ci/ranges.py --runs 3     or so many
    python .ci/ranges.py --write      write the tables again, from the runs that are there

Every run has processes of its own. It is added to `docs/benchmarks/ranges.json` with its day, its
machine and its versions, so that runs of several machines come together; a page then has, after
`<!-- ranges: NAME -->`, a sentence on the runs and the table of that name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs/benchmarks/ranges.json"
PAGES = (
    "packages/ckpt-wrap/README.md",
    "docs/sac-policies/recipe.md",
    "docs/benchmarks/calls-steps-and-ranks_cpu_2026-11_torchparts.md",
    "docs/benchmarks/recipe-and-budget_cpu_2026-11_torchparts.md",
)
WIDTHS = (32, 128, 256)
WAYS = {  # as the benchmark names them, and as pages do
    "none": "none",
    "full": "full checkpointing",
    "ours, second forward": "full, second forward of `fit_`",
    "torch SAC": "torch SAC",
    "torch.compile, budget": "torch.compile (aot_eager, partitioned), budget 0.6",
    "ours, contexts": "contexts engine",
    "ours, recipe": "recipe engine",
    "ours, unchecked": 'recipe engine, `determinism_check="none"`',
}
SHORT = ("none", "torch SAC", "ours, contexts", "ours, recipe")
KINDS = ("torch's wrapper", "nested", "in place")
Numbers = dict[str, float]


def run_once() -> dict[str, Any]:
    """Everything that is timed, once, and where and when."""
    import torch

    timed = _pytest("ckpt-wrap", "bench_call.py", "bench_state_dict.py")
    calls = timed["test_no_grad_call"]
    names, leaves = timed["test_attribute_access"], timed["test_state_dict[800]"]
    return {
        "day": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "wrapper": {
            "call": {kind: calls[kind] - calls["bare"] for kind in KINDS},
            "forward": {kind: timed["test_grad_forward"][kind] for kind in KINDS},
            "attribute": {kind: names[kind] / names["bare"] for kind in KINDS},
            "state_dict": {kind: leaves[kind] / leaves["plain"] for kind in KINDS},
        },
        "ways": {str(width): _ways(width) for width in WIDTHS},
    }


def _pytest(package: str, *files: str) -> dict[str, Numbers]:
    """What each benchmark noted, by the test's name."""
    folder = ROOT / f"packages/{package}/benchmarks"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        paths = [str(folder / file) for file in files]
        pytest = [sys.executable, "-m", "pytest", "-q", f"--benchmark-json={out}", *paths]
        subprocess.run(pytest, check=True, cwd=ROOT)
        said = json.loads(out.read_text(encoding="utf-8"))
    return {one["name"]: one["extra_info"] for one in said["benchmarks"]}


def _ways(width: int) -> dict[str, Numbers]:
    """Of each way of checkpointing, its time over none and the MiB that it keeps."""
    script = ROOT / "packages/sac-policies/benchmarks/bench_recipe.py"
    command = [sys.executable, str(script), "--width", str(width)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {r["way"]: {"time": r["over_none"], "kept_mib": r["kept_mib"]} for r in rows}


def _processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def between(values: Sequence[float]) -> str:
    """The least and the most, in three digits; one number where they are the same then."""
    ends = [
        f"{value:.2f}" if value < 10 else f"{value:.1f}" for value in (min(values), max(values))
    ]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def tables(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The lines of each table, by name."""
    return {
        "wrapper": _wrapper(runs),
        "wrapper and targets": _wrapper_and_targets(runs),
        "ways": _ways_table(runs, SHORT),
        "all ways": _ways_table(runs, tuple(WAYS)),
    }


def _row(what: str, *cells: str) -> str:
    return f"| {what} | " + " | ".join(cells) + " |"


def _wrapper(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = {
        "call": "call with gradients off, over the bare module, us",
        "forward": "forward of one layer with gradients, us",
        "state_dict": "`state_dict()` of 800 blocks, every leaf wrapped, over plain",
        "attribute": "reading an attribute, over the bare module",
    }
    return [
        _row("", *KINDS),
        _row("---", *("---",) * 3).replace(" ", ""),
        *(_row(text, *_cells(runs, key, KINDS)) for key, text in rows.items()),
        _row("copies made to offload two tensors that are saved seven times", "7", "2", "2"),
    ]


def _wrapper_and_targets(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = {
        "call": ("call without gradients", "0.5 and 2.5"),
        "forward": ("forward with gradients, whole call", "0.93 of torch's; 0.53"),
        "attribute": ("attribute access, ratio", "1.2 in place"),
        "state_dict": ("`state_dict()` of 800 blocks, ratio", "1.1 and 2"),
    }
    order = KINDS[::-1]
    return [
        _row("us over the bare module", *order, "target"),
        _row("---", *("---",) * 4).replace(" ", ""),
        *(_row(text, *_cells(runs, key, order), aim) for key, (text, aim) in rows.items()),
    ]


def _cells(runs: Sequence[Mapping[str, Any]], key: str, order: Sequence[str]) -> list[str]:
    return [between([run["wrapper"][key][kind] for run in runs]) for kind in order]


def _ways_table(runs: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> list[str]:
    """Of the ways that every run has."""

    def all_of(width: int, way: str, what: str) -> str:
        return between([run["ways"][str(width)][way][what] for run in runs])

    last = WIDTHS[-1]
    heads = [f"width {width}" for width in WIDTHS]
    return [
        _row("way", *heads, f"kept, width {last}, MiB"),
        _row("---", *("---",) * (len(WIDTHS) + 1)).replace(" ", ""),
        *(
            _row(
                WAYS[way], *(all_of(w, way, "time") for w in WIDTHS), all_of(last, way, "kept_mib")
            )
            for way in ways
            if all(way in run["ways"][str(w)] for run in runs for w in WIDTHS)
        ),
    ]


def sentence(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many runs, where and when."""
    machines = sorted({run["machine"] for run in runs})
    days = sorted({run["day"] for run in runs})
    versions = ", ".join(sorted({run["torch"] for run in runs}))
    where = "one machine" if len(machines) == 1 else f"{len(machines)} machines"
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    ends = f"Lowest and highest values of {len(runs)} runs on {where} ({'; '.join(machines)})"
    return f"{ends}, torch {versions}, {when}:"


def written(text: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """A page with its tables as these runs have them."""
    for name, lines in tables(runs).items():
        old = re.compile(
            rf"(<!-- ranges: {name} -->\n\n)(?:[^|<\n].*\n\n)?<!-- figures: \S+ -->\n\n(?:\|.*\n)+"
        )
        table = "\n".join(lines)
        new = f"{sentence(runs)}\n\n<!-- figures: docs/benchmarks/ranges.json -->\n\n{table}\n"
        text = old.sub(lambda match, new=new: match[1] + new, text)
    return text


def save(runs: list[dict[str, Any]], file: Path = FILE) -> None:
    """The runs, and what pages say of them."""
    content = {"runs": runs, "tables": tables(runs)}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None, once: Callable[[], Any] = run_once) -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="no run, the tables only")
    parser.add_argument("--file", type=Path, default=FILE, help="another one leaves pages alone")
    options = parser.parse_args(arguments)
    runs = json.loads(options.file.read_text("utf-8"))["runs"] if options.file.exists() else []
    for number in range(0 if options.write else options.runs):
        print(f"ranges: run {number + 1} of {options.runs}", flush=True)
        runs.append(once())
        save(runs, options.file)
    if len(runs) < 2:
        print(f"ranges: {len(runs)} run is no range, but pages give one. Run it again.")
        return 1
    save(runs, options.file)
    if options.file == FILE:
        for name in PAGES:
            page = ROOT / name
            page.write_text(written(page.read_text("utf-8"), runs), encoding="utf-8")
        subprocess.run([sys.executable, str(ROOT / ".ci/figures.py"), "--record"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
