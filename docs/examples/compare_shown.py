"""The output of `compare_gpt.py`: a table, predicted savings, JSON, progress and a plot."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from train_gpt import GPT, Config, checkpointed_in_place, loss_of

MEASURED = 2  # the step whose bytes are counted: optimizer state and all buffers exist


@dataclass
class Row:
    """Results of one configuration; losses are in nats per byte."""

    configuration: str
    saved_bytes: int
    peak_bytes: int
    seconds: list[float]
    losses: list[float]
    validation_loss: float


def times_plain(row: Row, rows: list[Row]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of a row's time relative to plain's in the same turn."""
    pairs = list(zip(row.seconds, rows[0].seconds, strict=True))[MEASURED:]
    ratios = [mine / plain for mine, plain in pairs]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    tenths = quantiles(ratios, n=10, method="inclusive")
    return median(ratios), tenths[0], tenths[-1]


def mib(count: int) -> str:
    """Format a number of bytes in MiB."""
    return f"{count / 2**20:.2f} MiB"


def table(rows: list[Row]) -> str:
    """Format the rows as a table; the JSON file has all digits."""
    head = f"{'configuration':24}{'saved MiB':>10}{'peak MiB':>10}{'ms/step':>9}{'time':>7}"
    lines = [
        f"{head}{'10-90 %':>13}{'loss':>9}{'val loss':>10}  losses equal {rows[0].configuration}'s"
    ]
    for row in rows:
        middle, low, high = times_plain(row, rows)
        equal = "every bit" if row.losses == rows[0].losses else "no"
        milliseconds = median(row.seconds[MEASURED:]) * 1e3
        lines.append(
            f"{row.configuration.replace('_', ' '):24}"
            f"{row.saved_bytes / 2**20:>10.2f}{row.peak_bytes / 2**20:>10.2f}"
            f"{milliseconds:>9.1f}{middle:>6.2f}x{f'{low:.2f} to {high:.2f}':>13}"
            f"{row.losses[-1]:>9.4f}{row.validation_loss:>10.4f}  {equal}"
        )
    turns = len(rows[0].seconds) - MEASURED
    lines.append(f"time: over {rows[0].configuration}'s of the same turn, median of {turns} turns")
    return "\n".join(lines)


def theory(rows: list[Row], config: Config) -> str:
    """Predict the bytes that checkpointing every block frees, from shapes only.

    Per block, in units of B*T*W floats: LayerNorm inputs 2, projections' inputs 2 (qkv, up),
    qkv's output 3, attention's output 1, dropout masks 2, GELU's input 4 and output 4: 18.
    In addition LayerNorm's mean and rstd (2 * 2 * B*T) and attention's log-sum-exp (B*T*heads).
    A checkpointed block keeps its input, 1 unit, and the state of the random generator.
    """
    B, T, W, L = config.batch, config.context, config.width, config.layers
    kept = 18 * B * T * W + 4 * B * T + B * T * config.heads
    freed = L * (4 * (kept - B * T * W) - torch.get_rng_state().nbytes)
    line = f"checkpointing {L} blocks should free {mib(freed)} of saved activations"
    saved = {row.configuration: row.saved_bytes for row in rows}
    if {"plain", "checkpointed"} <= saved.keys():
        measured = saved["plain"] - saved["checkpointed"]
        line += f"; measured: {mib(measured)}, which is {measured - freed:+,} bytes"
    return line


def profile_modules(trainer: Any, out: Path) -> str:
    """Print the slowest modules of one checkpointed step, and write its timeline for Perfetto."""
    from mod_tracker import profile_flops, profile_memory, profile_time, trace

    config, model = trainer.config, trainer.model
    trainer.optimizer = optimizer = checkpointed_in_place(model, config)
    batch = next(trainer.batch)
    trainer._train(*batch)
    with profile_flops(model) as flops:
        trainer._train(*batch)
    with profile_time(model, clock=config.device) as seconds:
        trainer._train(*batch)
    with profile_memory(model, optimizer=optimizer) as memory:
        trainer._train(*batch)
    with trace(model) as timeline:
        trainer._train(*batch)
    (out / "trace.json").write_text(timeline.to_json())
    columns = []
    for title, report, by, show in (
        ("FLOPs", flops, "self_total", flops.show),
        ("time", seconds, "self_total", seconds.show),
        ("bytes allocated", memory, "self_allocated", mib),
    ):
        rows = report.top(5, by=by)
        cells = [f"{row.name:21}{show(getattr(row, by)):>10}" for row in rows]
        columns.append([f"{'by ' + title:31}", *cells])
    return "\n".join("   ".join(line).rstrip() for line in zip(*columns, strict=True))


def page_of_memory(trainer: Any, out: Path) -> str:
    """Print the largest kind of memory and its module; write the whole page."""
    from mod_tracker import watch_memory

    inputs, targets = next(trainer.batch)
    with watch_memory(trainer.model, optimizer=trainer.optimizer) as watch:
        trainer._train(inputs, targets)
        loss = loss_of(trainer.model, inputs, targets)
        page = watch.page()
        loss.backward()
    (out / "memory.txt").write_text(f"{page}\n")
    kinds = sorted(page.by_kind().items(), key=lambda item: -item[1])
    all_of_it = ", ".join(f"{kind} {mib(count)}" for kind, count in kinds if kind != "unseen")
    largest = list(page.inside("saved").items())[:3]
    saved = ", ".join(f"{name} {mib(count)}" for name, count in largest)
    return f"{all_of_it}\nsaved for backward inside: {saved}"


def write(rows: list[Row], config: Config, out: Path) -> None:
    """Write all digits; after Ctrl-C, of the finished turns."""
    report = {"torch": torch.__version__, "config": asdict(config)}
    report["rows"] = [asdict(row) for row in rows]
    (out / "table.json").write_text(json.dumps(report, indent=1) + "\n")


class Progress:
    """A progress bar on a terminal, occasional lines elsewhere."""

    def __init__(self, config: Config, count: int) -> None:
        self.config, self.bar = config, None
        self.rows: dict[str, Row] = {}
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich.progress import BarColumn, Progress, TextColumn

            columns = TextColumn("{task.description:24}"), BarColumn()
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"))
            self.task = self.bar.add_task("", total=config.steps * count, note="")
            self.bar.start()

    def step(self, step: int, row: Row) -> None:
        """Show one finished training step and keep its row."""
        self.rows[row.configuration] = row
        name = row.configuration.replace("_", " ")
        note = f"turn {step + 1}/{self.config.steps}  loss {row.losses[-1]:.3f}"
        if self.bar is not None:
            self.bar.update(self.task, advance=1, description=name, note=note)
        elif row.configuration == "plain" and step % max(1, self.config.steps // 8) == 0:
            print(f"{name:24} {note}", flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self.bar is not None:
            self.bar.stop()


def plot(rows: list[Row], config: Config, out: Path) -> None:
    """Plot memory against time, with the spread of each configuration, and a block's frontier."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot was drawn")
        return
    from matplotlib.figure import Figure

    from sac_policies import profile, solve

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row, marker in zip(rows, itertools.cycle("os^vD*PX"), strict=False):
        middle, low, high = times_plain(row, rows)
        spread = [[middle - low], [high - middle]]
        label = row.configuration.replace("_", " ")
        axes.errorbar(middle, row.saved_bytes / 2**20, xerr=spread, fmt=marker, label=label)
    axes.legend()
    title = f"GPT, {config.layers} blocks of width {config.width}: what each way costs"
    axes.set(xlabel=f"time of a step over {rows[0].configuration}'s (bar: 10 to 90 %)", title=title)
    axes.set(ylabel="saved for backward, MiB", ylim=(0, None))
    figure.savefig(out / "memory_against_time.png", dpi=120)
    shape = config.batch, config.context, config.width
    sample = torch.zeros(shape, device=config.device, requires_grad=True)
    block = GPT(config).to(config.device).blocks[0]
    trace = profile(block, sample, unit="flops")
    title = f"What memory buys in a block of width {config.width} (budget_half has the mark)"
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    points, half = filter(None, (solve(trace, n / 32) for n in range(33))), solve(trace, "50%")
    found = [(plan.kept_bytes / 2**20, plan.recompute_cost) for plan in points]
    axes.step(*zip(*found, strict=True), where="post")
    size = half.kept_bytes / 2**20
    axes.plot([size], [half.recompute_cost], "o", label=f"chosen: {size:.2f} MiB")
    axes.legend()
    axes.set(xlabel="kept, MiB", ylabel="work repeated in backward, FLOP", title=title)
    figure.savefig(out / "budgets_of_a_block.png", dpi=120)
