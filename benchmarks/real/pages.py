"""Write measured tables and the figure into README.md and the benchmarks page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .results import OURS, figure, is_one_of, table

BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
FIGURE = "docs/assets/time-against-memory.svg"
# Rows of the README, and how it names them.
FRONT = {
    "plain": "plain",
    "fit_ 75%": '`fit_(model, batch, "75%")`',
    "fit_ 50%": '`fit_(model, batch, "50%")`',
    "torch SAC": "torch's selective checkpointing, matmuls and attention",
    "sac_policies matmuls": "sac-policies, the same operators",
    "checkpoint_": "`checkpoint_` on each layer",
    "transformers": "transformers' switch",
    "checkpoint_ and offload_": "`checkpoint_` and `offload_`",
}


def write_pages(result: dict[str, Any], root: Path) -> list[Path]:
    """Replace what stands between the marks of both pages, and the figure; return the files.

    Args:
        result: of a finished run of `--front-page`.
        root: of the repository.

    Raises:
        ValueError: a page is missing or lacks the marks; then nothing is written.
    """
    pages = {
        root / "README.md": "\n".join(_front(result)),
        root / "docs/benchmarks.md": "\n".join(_benchmarks(result)),
    }
    texts = {path: _replaced(path, inside) for path, inside in pages.items()}
    texts[root / FIGURE] = figure(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def check_pages(root: Path) -> None:
    """Raise `ValueError` if a page is missing or lacks the marks."""
    for path in (root / "README.md", root / "docs/benchmarks.md"):
        _replaced(path, "")


def _replaced(path: Path, inside: str) -> str:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{inside}\n\n{END}{after}"


def _front(result: dict[str, Any]) -> Iterator[str]:
    run = result["runs"][0]
    rows = [entry for entry in run["ways"] if entry["way"] in FRONT and "ms" in entry]
    yield f"![Tokens per second against peak memory]({FIGURE})\n"
    size = f"a Llama of {run['parameters'] / 1e9:.1f}B"
    if run["parameters"] < 1e8:
        size = f"a Llama of {run['parameters'] / 1e6:.1f} M parameters"
    yield f"| a whole training step of {size}, {result['device']} | peak memory, MiB | step, ms |"
    yield "|---|---|---|"
    for entry in sorted(rows, key=lambda each: -each["peak_mib"]):
        yield f"| {FRONT[entry['way']]} | {entry['peak_mib']:,.0f} | {entry['ms']:,.0f} |"
    yield f"\n{_about(result, run)}; parameters, gradients and the optimizer's state are included."
    ours = [each for each in rows if is_one_of(each["way"], OURS)]
    off = [FRONT[each["way"]] for each in ours if each["gradients"] != "equal"]
    yield (
        f"Gradients differ from the plain model's: {', '.join(off)}."
        if off
        else "Gradients of our rows are bit-identical to the plain model's."
    )
    yield (
        "`python -m benchmarks.real --front-page --pages` repeats the comparison on your card. "
        "[Benchmarks](docs/benchmarks.md) has more, also where another library is better."
    )


def _about(result: dict[str, Any], run: dict[str, Any]) -> str:
    libraries = ", ".join(f"{name} {number}" for name, number in _versions(result))
    batch = f"{run['sequences']} x {run['tokens_each']:,} tokens"
    return f"{run['dtype']}, {batch}, AdamW, {libraries}, {result['date'][:10]}"


def _versions(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, result["libraries"].get(name))
        for name in ("torch", "transformers")
        if result["libraries"].get(name)
    ]


def _benchmarks(result: dict[str, Any]) -> Iterator[str]:
    yield f"## Llamas, {result['device']}\n"
    libraries = ", ".join(
        f"{name} {number}" for name, number in result["libraries"].items() if number
    )
    yield f"{result['date'][:10]}, Python {result['python']}, {libraries}."
    yield (
        "Times are medians of whole steps with AdamW, in turns in one process; the peak includes "
        "parameters, gradients and the optimizer's state. Ratios are to the first way of a group.\n"
    )
    yield f"```console\n{result['command']}\n```"
    for run in result["runs"]:
        yield (
            f"\n### {run['model']}: {run['parameters'] / 1e6:,.1f} M parameters, {run['dtype']}, "
            f"{run['sequences']} x {run['tokens_each']:,} tokens\n"
        )
        yield table(run["ways"])
