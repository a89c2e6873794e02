"""Train a small byte-level GPT on real text, once per configuration, and compare what each costs.

    python docs/examples/train_gpt.py                      # all configurations, 2 to 4 minutes
    python docs/examples/train_gpt.py --quick              # 20 seconds
    python docs/examples/train_gpt.py --config plain checkpointed --layers 8 --width 256
    python docs/examples/train_gpt.py --data my_texts/ --device cuda

The text is the source code of Python's own standard library, which every machine has. Every
configuration trains the same model from the same seed on the same batches, so where the
arithmetic is the same the losses are the same to the last bit. Shapes in comments: B batch,
T context (tokens), W width, L layers, V vocabulary (256 bytes).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop lines

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# --- the text ------------------------------------------------------------------------------------


class UsageError(Exception):
    """Something the command line asked for cannot be had; the message is one line."""


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on, uint8 tensors of shape (bytes,)."""

    train: torch.Tensor
    validation: torch.Tensor


def text_files(data: Path | None) -> list[Path]:
    """List the files to read, in a fixed order."""
    if data is None:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not data.exists():
        raise UsageError(f"--data {data} does not exist, but it must name a file or a folder")
    return [data] if data.is_file() else sorted(p for p in data.rglob("*") if p.is_file())


def read_text(data: Path | None, context: int) -> Text:
    """Read the text and keep every tenth file (or the last tenth of one file) for validation."""
    blobs = [path.read_bytes() for path in text_files(data)]
    if len(blobs) == 1:
        cut = len(blobs[0]) * 9 // 10
        parts = blobs[0][:cut], blobs[0][cut:]
    else:
        kept = [blob for i, blob in enumerate(blobs) if i % 10 != 9]
        parts = b"".join(kept), b"".join(blobs[9::10])
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) <= context + 1:
            raise UsageError(
                f"--data gives {len(part)} bytes of {name} text, but one sample needs "
                f"{context + 2}. Give more text or a smaller --context"
            )
    train, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return Text(train, validation)


def batches(
    text: torch.Tensor, options: argparse.Namespace, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs, targets), each of shape (B, T), int64, for ever and reproducibly.

    Every rank draws the same starts and takes its share of them.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(options.context + 1)
    while True:
        starts = torch.randint(
            len(text) - options.context - 1, (options.batch,), generator=generator
        )
        mine = starts[options.rank :: options.world_size, None]
        window = text[mine + offsets].long().to(options.device)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


# --- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, W) to (B, T, W)."""
        B, T, W = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(B, T, W)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A pre-norm transformer over bytes with learned positions."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(options.context, width) * 0.02)
        self.blocks = nn.ModuleList(
            Block(width, options.heads, options.dropout) for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (B, T) int64 to logits of shape (B, T, V)."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats per byte, a scalar."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# --- the configurations --------------------------------------------------------------------------


@dataclass
class Setup:
    """What one configuration changes: the model in place, and how it is stepped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    close: Callable[[], None] = lambda: None


def adamw(parameters: Iterator[nn.Parameter] | list[torch.Tensor]) -> torch.optim.Optimizer:
    """Build the optimizer that every configuration uses."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), fused=True)


def plain(model: GPT, options: argparse.Namespace) -> Setup:
    """Keep every activation: the run that the others are compared with."""
    return Setup(model, adamw(model.parameters()))


def checkpointed(model: GPT, options: argparse.Namespace) -> Setup:
    """Recompute every block in backward, with the names that torch's wrapper has."""
    from ckpt_wrap import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return Setup(model, adamw(model.parameters()))


def checkpointed_in_place(model: GPT, options: argparse.Namespace) -> Setup:
    """Recompute every block in backward, without a wrapper: no name and no class changes."""
    from ckpt_wrap import checkpoint_

    for block in model.blocks:
        checkpoint_(block)
    return Setup(model, adamw(model.parameters()))


def offload_to_disk(model: GPT, options: argparse.Namespace) -> Setup:
    """Keep what the blocks save in memory-mapped files until backward asks for it."""
    from ckpt_wrap import offload_

    folder = tempfile.TemporaryDirectory(prefix="train-gpt-")
    for block in model.blocks:
        offload_(block, to=folder.name)
    return Setup(model, adamw(model.parameters()), close=folder.cleanup)


def flat(model: GPT, options: argparse.Namespace) -> Setup:
    """Put all parameters into one tensor, and step torch's fused AdamW over pieces of it."""
    from flat_param import flatten

    return Setup(model, adamw(flatten(model).chunks()))


def save_matmuls(model: GPT, options: argparse.Namespace) -> Setup:
    """Keep what matrix products and attention return; recompute the cheap rest."""
    from ckpt_wrap import checkpoint_
    from sac_policies import ATTENTION, MATMULS, checkpoint, save_ops

    for block in model.blocks:
        checkpoint_(block, checkpoint_fn=checkpoint, policy=save_ops(MATMULS, ATTENTION))
    return Setup(model, adamw(model.parameters()))


def budget_half(model: GPT, options: argparse.Namespace) -> Setup:
    """Let a solver choose what each block keeps: half of the bytes, for the least work repeated."""
    from ckpt_wrap import checkpoint_
    from sac_policies import checkpoint, pareto, plot_pareto, profile, solve

    sample = torch.zeros(options.batch, options.context, options.width, device=options.device)
    trace = profile(model.blocks[0], sample.requires_grad_(), unit="flops")
    for block in model.blocks:
        checkpoint_(block, checkpoint_fn=checkpoint, policy=solve(trace, "50%"))
    if has_matplotlib():
        plot_pareto(pareto(trace), str(options.out / "pareto_of_a_block.png"))
    return Setup(model, adamw(model.parameters()))


def sharded(model: GPT, options: argparse.Namespace) -> Setup:
    """Divide parameters, gradients and optimizer state between the ranks, a block at a time."""
    from flat_param import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return Setup(model, adamw(model.parameters()))


CONFIGURATIONS: dict[str, Callable[[GPT, argparse.Namespace], Setup]] = {
    "plain": plain,
    "checkpointed": checkpointed,
    "checkpointed in place": checkpointed_in_place,
    "offload to disk": offload_to_disk,
    "save matmuls": save_matmuls,
    "budget 50%": budget_half,
    "flat (fused step)": flat,
    "sharded x2": sharded,
}

ON_TWO_RANKS = {"sharded x2"}

# --- training and measuring ----------------------------------------------------------------------


@dataclass
class Row:
    """What one configuration cost and reached. Bytes are bytes; losses are nats per byte."""

    configuration: str
    saved_bytes: int
    peak_bytes: int
    ms_per_step: float
    training_loss: float
    validation_loss: float
    bit_identical: bool
    losses: list[float]


def train_step(setup: Setup, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Take one optimizer step; return the detached loss, a scalar."""
    with torch.profiler.record_function("forward"):
        loss = loss_of(setup.model, inputs, targets)
    loss.backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def measure_step(
    setup: Setup, options: argparse.Namespace, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, int, int]:
    """Take one step under the profiler; return the loss, bytes alive after forward, and peak.

    Every allocation and release of the device's allocator is in the trace, so both figures are
    counts. The peak includes the parameters and the optimizer's state.
    """
    from torch.profiler import ProfilerActivity, profile

    static = sum(t.nbytes for t in [*setup.model.parameters(), *setup.model.buffers()])
    for state in setup.optimizer.state.values():
        static += sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        loss = train_step(setup, inputs, targets)
    path = options.out / f"step-{options.rank}.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    forward = next(e for e in events if e.get("name") == "forward" and e.get("ph") == "X")
    kind = 1 if options.device == "cuda" else 0
    changes = sorted(
        (e["ts"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"]["Device Type"] == kind
    )
    alive, saved, peak = 0, 0, 0
    for when, change in changes:
        alive += change
        peak = max(peak, alive)
        if when <= forward["ts"] + forward["dur"]:
            saved = alive
    return loss, saved, static + peak


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of every rank's loss, or the loss itself where there is one rank."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def train_on_two_ranks(name: str, text: Text, options: argparse.Namespace, show: Progress) -> Row:
    """Run this script again with torchrun, for one configuration, and read the row it writes."""
    with tempfile.TemporaryDirectory(prefix="train-gpt-") as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        own = [__file__, *options.arguments, "--config", name, "--out", folder]
        quiet = subprocess.DEVNULL if show.bar else None
        result = subprocess.run(
            [sys.executable, *launch, *own],
            stdout=quiet,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if result.returncode:
            raise RuntimeError(f"torchrun failed for {name!r}:\n{result.stderr[-8000:]}")
        (row,) = json.loads((Path(folder) / "table.json").read_text())["rows"]
    return Row(**row)


@torch.no_grad()
def validate(model: nn.Module, text: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """Return the mean loss over a fixed set of validation batches, a scalar."""
    model.eval()
    source = batches(text, options, seed=2)
    losses = [loss_of(model, *next(source)) for _ in range(options.validation_batches)]
    model.train()
    return torch.stack(losses).mean()


def train(name: str, text: Text, options: argparse.Namespace, show: Progress) -> Row:
    """Train one configuration from the common seed and measure it."""
    torch.manual_seed(0)
    model = GPT(options).to(options.device)
    setup = CONFIGURATIONS[name](model, options)
    # A setup may have run the model, and dropout draws from this.
    torch.manual_seed(1 + options.rank)
    try:
        source, losses, times, measured = batches(text.train, options, seed=1), [], [], (0, 0)
        for step in range(options.steps):
            inputs, targets = next(source)
            start = time.perf_counter()
            if step == 2:  # the optimizer's state exists, and every buffer has been made
                loss, *measured = measure_step(setup, options, inputs, targets)
            else:
                loss = train_step(setup, inputs, targets)
            losses.append(mean_over_ranks(loss))
            if step > 2:
                times.append(time.perf_counter() - start)
            show.step(name, step, losses[-1], time.perf_counter() - start)
        validation = mean_over_ranks(validate(setup.model, text.validation, options))
    finally:
        setup.close()
    median = sorted(times)[len(times) // 2]
    return Row(name, *measured, median * 1e3, losses[-1], validation, False, losses)


def profile_modules(text: Text, options: argparse.Namespace) -> str:
    """Say which modules cost most in one checkpointed step, and write its timeline for Perfetto."""
    from mod_tracker import profile_flops, profile_memory, profile_time, trace

    torch.manual_seed(0)
    model = GPT(options).to(options.device)
    setup = checkpointed_in_place(model, options)
    inputs, targets = next(batches(text.train, options, seed=1))
    train_step(setup, inputs, targets)
    with profile_flops(model) as flops:
        train_step(setup, inputs, targets)
    with profile_time(model, clock=options.device) as seconds:
        train_step(setup, inputs, targets)
    with profile_memory(model, optimizer=setup.optimizer) as memory:
        train_step(setup, inputs, targets)
    with trace(model) as timeline:
        train_step(setup, inputs, targets)
    (options.out / "trace.json").write_text(timeline.to_json())
    columns = []
    for title, report, by in (
        ("FLOPs", flops, "self_total"),
        ("time", seconds, "self_total"),
        ("bytes allocated", memory, "self_allocated"),
    ):
        rows = report.top(5, by=by)
        cells = [f"{row.name:18}{report.show(getattr(row, by)):>11}" for row in rows]
        columns.append([f"{'by ' + title:29}", *cells])
    return "\n".join("   ".join(line) for line in zip(*columns, strict=True))


# --- what a person sees --------------------------------------------------------------------------


class Progress:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.bar, self.task = options, None, None
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, Progress, TextColumn
            except ModuleNotFoundError:
                return
            self.bar = Progress(
                TextColumn("{task.description:24}"), BarColumn(), "{task.fields[note]}"
            )
            self.bar.start()

    def step(self, name: str, step: int, loss: float, seconds: float) -> None:
        """Report one finished training step."""
        options = self.options
        note = f"loss {loss:.3f}  {options.batch * options.context / seconds:,.0f} tokens/s"
        if options.rank:
            return
        if self.bar is None:
            if step % max(1, options.steps // 4) == 0 or step == options.steps - 1:
                print(f"{name:24} step {step + 1:4}/{options.steps}  {note}", flush=True)
            return
        if step == 0:
            self.task = self.bar.add_task(name, total=options.steps, note=note)
        self.bar.update(self.task, completed=step + 1, note=note)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()


def table(rows: list[Row]) -> str:
    """Format the rows for people; the JSON beside it has every digit."""
    head = f"{'configuration':24}{'saved MiB':>10}{'peak MiB':>10}{'ms/step':>9}"
    lines = [head + f"{'loss':>9}{'val loss':>10}  losses equal to plain"]
    for row in rows:
        equal = "every bit" if row.bit_identical else "no"
        lines.append(
            f"{row.configuration:24}{row.saved_bytes / 2**20:>10.2f}{row.peak_bytes / 2**20:>10.2f}"
            f"{row.ms_per_step:>9.1f}{row.training_loss:>9.4f}{row.validation_loss:>10.4f}  {equal}"
        )
    return "\n".join(lines)


def theory(rows: list[Row], options: argparse.Namespace) -> str:
    """Say how many bytes checkpointing every block should free, from the shapes alone.

    Per block, in units of B*T*W floats: LayerNorm inputs 2, projections' inputs 2 (qkv, up),
    qkv's output 3, attention's output 1, dropout masks 2, GELU's input 4 and output 4: 18.
    Beside them LayerNorm's mean and rstd (2 * 2 * B*T) and attention's log-sum-exp (B*T*heads).
    A checkpointed block keeps its input, 1 unit, and the state of the random generator.
    """
    B, T, W, L = options.batch, options.context, options.width, options.layers
    kept = 18 * B * T * W + 4 * B * T + B * T * options.heads
    freed = L * (4 * (kept - B * T * W) - torch.get_rng_state().nbytes)
    line = f"checkpointing {L} blocks should free {freed:,} bytes of saved activations"
    saved = {row.configuration: row.saved_bytes for row in rows}
    if {"plain", "checkpointed"} <= saved.keys():
        line += f"; measured: {saved['plain'] - saved['checkpointed']:,}"
    return line


def write(rows: list[Row], options: argparse.Namespace) -> None:
    """Write every finished row; called after each one, so that Ctrl-C loses none."""
    shown = {key: str(value) for key, value in sorted(vars(options).items())}
    report = {"torch": torch.__version__, "options": shown, "rows": [asdict(row) for row in rows]}
    (options.out / "table.json").write_text(json.dumps(report, indent=1) + "\n")


def has_matplotlib() -> bool:
    """Whether plots can be drawn here; the demo does without where they cannot."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(rows: list[Row], options: argparse.Namespace) -> None:
    """Draw memory against time, one point per configuration."""
    if not has_matplotlib():
        print("matplotlib is not installed: no plot was drawn")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row, marker in zip(rows, itertools.cycle("os^vD*PX"), strict=False):
        point = row.ms_per_step, row.saved_bytes / 2**20
        axes.scatter(*point, marker=marker, label=row.configuration)
    axes.legend()
    axes.set(xlabel="ms per step", ylabel="saved activations, MiB", ylim=(0, None))
    figure.savefig(options.out / "memory_against_time.png", dpi=120)


# --- the command line ----------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line and refuse what cannot be done, before anything is trained."""
    parser = argparse.ArgumentParser(description="Train a small GPT with each part.")
    positive = ("layers", "width", "heads", "context", "batch", "steps")
    for name, default in zip(positive, (6, 192, 6, 128, 8, 40), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--data", type=Path, help="a text file or a folder of them")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--config", nargs="+", default=list(CONFIGURATIONS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a 20-second run")
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    options.rank = int(os.environ.get("RANK", 0))
    options.world_size = int(os.environ.get("WORLD_SIZE", 1))
    if options.quick:
        options.layers, options.width, options.context, options.steps = 4, 96, 64, 12
    options.validation_batches = 2 if options.quick else 8
    for name in positive:
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}, but it must be at least 1")
    if options.steps < 4:
        raise UsageError(f"--steps is {options.steps}, but 4 are needed to measure and to time")
    if options.width % options.heads:
        raise UsageError(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if not 0 <= options.dropout < 1:
        raise UsageError(f"--dropout is {options.dropout}, but it must be in [0, 1)")
    for name in options.config:
        if name not in CONFIGURATIONS:
            known = ", ".join(repr(known) for known in CONFIGURATIONS)
            raise UsageError(f"--config {name!r} is unknown. The configurations are {known}")
    if options.batch % 2 and ON_TWO_RANKS.intersection(options.config):
        raise UsageError(f"--batch is {options.batch}, but two ranks need an even number")
    if options.device not in ("cpu", "cuda"):
        raise UsageError(f"--device {options.device!r} is unknown. Give cpu or cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda was asked for, but torch sees no CUDA device here")
    return options


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a refusal into one line and exit code 2, and Ctrl-C into a short goodbye."""
    try:
        yield
    except UsageError as error:
        print(f"train_gpt: {error}.", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ntrain_gpt: stopped; the rows finished so far are on disk.", file=sys.stderr)
        raise SystemExit(130) from None


def run_rank(text: Text, options: argparse.Namespace, show: Progress) -> None:
    """Train the configurations as one rank of several; the first rank writes the rows.

    Its figures are those of one rank: what divides between ranks is in them once.
    """
    dist.init_process_group("gloo")
    try:
        rows = [train(name, text, options, show) for name in options.config]
        if options.rank == 0:
            write(rows, options)
    finally:
        gc.collect()  # a sharded module holds its group, whose threads must end before Python does
        dist.destroy_process_group()


def compare(text: Text, options: argparse.Namespace, show: Progress) -> None:
    """Train every configuration asked for and say what each one saved."""
    rows: list[Row] = []
    for name in options.config:
        run = train_on_two_ranks if name in ON_TWO_RANKS else train
        row = run(name, text, options, show)
        rows.append(row)
        comparable = rows[0].configuration == "plain"
        row.bit_identical = comparable and row.losses == rows[0].losses
        write(rows, options)
    show.close()
    print(f"\n{table(rows)}")
    if ON_TWO_RANKS.intersection(options.config):
        print("x2: figures of one of two ranks; each has half of the batch and its own dropout")
    print(f"\n{theory(rows, options)}")
    print("\nThe five most expensive modules of a checkpointed step, without their children:")
    print(profile_modules(text, options))
    plot(rows, options)
    print(f"written to {options.out}/")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    with one_line_errors():
        options = parse(arguments)
        text = read_text(options.data, options.context)
        options.out.mkdir(parents=True, exist_ok=True)
        show = Progress(options)
        try:
            (run_rank if options.world_size > 1 else compare)(text, options, show)
        finally:
            show.close()


if __name__ == "__main__":
    main()
