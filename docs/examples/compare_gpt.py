"""Train the GPT of `train_gpt.py` in several configurations and compare memory and time.

    python docs/examples/compare_gpt.py                      # all configurations
    python docs/examples/compare_gpt.py --quick              # a smaller model, 12 steps
    python docs/examples/compare_gpt.py --config plain checkpointed --layers 8 --width 256
    python docs/examples/compare_gpt.py --data my_texts/ --device cuda

All configurations start from the same seed and train on the same batches, so configurations with
the same arithmetic have bit-identical losses. They take one step each in turn, and each time is
compared with plain's time of the same turn, so that changes in the machine's speed do not matter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop messages
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what it says of memory from before it

import torch
import torch.distributed as dist
from compare_shown import (
    MEASURED,
    Progress,
    Row,
    page_of_memory,
    plot,
    profile_modules,
    table,
    theory,
    write,
)
from more_ways import MORE_CONFIGURATIONS
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiler
from train_gpt import CONFIGURATIONS, GPT, Config, batches, loss_of, read_text

ALL = CONFIGURATIONS | MORE_CONFIGURATIONS
ON_TWO_RANKS = {name for name in ALL if name.startswith("sharded")}


class UsageError(Exception):
    """An option cannot be used here; the message is one line."""


# --- training, one step at a time ----------------------------------------------------------------


class Trainer:
    """One configuration, trained one step at a time with its own random state."""

    def __init__(self, name: str, text: Tensor, config: Config) -> None:
        self.config = config
        held_out = max(len(text) // 10, config.context + 2)
        self.text, self.held_out = text[:-held_out], text[-held_out:]
        torch.manual_seed(0)
        self.model = GPT(config).to(config.device)
        self.optimizer = ALL[name](self.model, config)
        self.batch = batches(self.text, config, seed=1)
        torch.manual_seed(1 + config.rank)
        self.random = self._random_state()
        self.row = Row(name, 0, 0, [], [], 0.0)

    def step(self) -> Row:
        """Take one step and record its loss, and its time or its bytes."""
        self._set_random_state()
        inputs, targets = next(self.batch)
        start = time.perf_counter()
        if len(self.row.losses) == MEASURED:
            loss = self._measure(inputs, targets)
        else:
            loss = self._train(inputs, targets)
            self.row.seconds.append(time.perf_counter() - start)
        self.row.losses.append(_mean_over_ranks(loss))
        self.random = self._random_state()
        return self.row

    def _train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with record_function("forward"):
            loss = loss_of(self.model, inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.device != "cpu":
            torch.accelerator.synchronize()
        return loss.detach()

    def _measure(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Count bytes alive after forward, and the peak with parameters and optimizer state.

        The profiler's trace has every allocation and release, so both figures are exact counts.
        """
        kept = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            kept += [value for value in state.values() if isinstance(value, Tensor)]
        # Files are not memory; a part that is read for a step is in the trace.
        in_memory = (tensor for tensor in kept if tensor.untyped_storage().filename is None)
        static = sum(tensor.nbytes for tensor in in_memory)
        cpu = [ProfilerActivity.CPU]
        with profiler(activities=cpu, profile_memory=True, acc_events=True) as profile:
            loss = self._train(inputs, targets)
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/step.json")
            events = json.loads(Path(folder, "step.json").read_text())["traceEvents"]
        forward = next(e for e in events if e.get("name") == "forward" and e.get("ph") == "X")
        kind = 0 if self.config.device == "cpu" else 1
        memory = (e for e in events if e.get("name") == "[memory]")
        mine = (e for e in memory if e["args"]["Device Type"] == kind)
        alive = peak = 0
        for when, change in sorted((e["ts"], e["args"]["Bytes"]) for e in mine):
            alive += change
            peak = max(peak, alive)
            if when <= forward["ts"] + forward["dur"]:
                self.row.saved_bytes = alive
        self.row.peak_bytes = static + peak
        return loss

    @torch.no_grad()
    def finish(self) -> Row:
        """Validate on held-out text, which completes the row."""
        self.model.eval()
        source = batches(self.held_out, self.config, seed=2)
        losses = [loss_of(self.model, *next(source)) for _ in range(4)]
        self.row.validation_loss = _mean_over_ranks(torch.stack(losses).mean())
        return self.row

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.config.device != "cpu":
            states.append(torch.get_device_module(self.config.device).get_rng_state())
        return states

    def _set_random_state(self) -> None:
        torch.set_rng_state(self.random[0])
        if self.config.device != "cpu":
            torch.get_device_module(self.config.device).set_rng_state(self.random[1])


def _mean_over_ranks(loss: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


class TwoRanks:
    """A trainer in two processes: each call runs in both, and rank 0's result is returned.

    The row has the figures of one rank; memory that is divided between ranks counts once.
    """

    def __init__(self, name: str, text: Tensor, config: Config) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="compare-gpt-")
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(2)]
        self.pipes = [mine for mine, _ in pairs]
        self.processes = []
        for rank, (_, theirs) in enumerate(pairs):
            mine = replace(config, rank=rank, world_size=2)
            arguments = (theirs, name, text, mine, f"file://{self.folder.name}/meet")
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
        self._answers()

    def step(self) -> Row:
        """Take one step on both ranks."""
        return self._call("step")

    def finish(self) -> Row:
        """End both processes and return rank 0's row."""
        row = self._call("finish")
        for process in self.processes:
            process.join()
        self.folder.cleanup()
        return row

    def _call(self, method: str) -> Any:
        for pipe in self.pipes:
            pipe.send(method)
        return self._answers()

    def _answers(self) -> Any:
        answers = [pipe.recv() for pipe in self.pipes]
        return answers[0]


def _serve(pipe: Any, name: str, text: Tensor, config: Config, meeting: str) -> None:
    """Run one rank: execute the calls from the pipe until the trainer is finished."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=config.rank, world_size=2)
    try:
        trainer = Trainer(name, text, config)
        pipe.send(None)
        while True:
            method = pipe.recv()
            pipe.send(getattr(trainer, method)())
            if method == "finish":
                return
    except (EOFError, KeyboardInterrupt):
        return
    finally:
        dist.destroy_process_group()


def train_in_turn(
    text: Tensor, config: Config, names: list[str], show: Callable[[int, Row], None]
) -> list[Row]:
    """Train every configuration, one step of each per turn; each turn starts with another one."""
    kinds = {name: TwoRanks if name in ON_TWO_RANKS else Trainer for name in names}
    trainers = [kinds[name](name, text, config) for name in names]
    for step in range(config.steps):
        first = step % len(trainers)
        for trainer in trainers[first:] + trainers[:first]:
            show(step, trainer.step())
    return [trainer.finish() for trainer in trainers]


# --- the command line ----------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> tuple[Config, list[str], Path]:
    """Read the command line; refuse invalid options before training."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT in each configuration, in turn."
    )
    for field in fields(Config)[:-2]:
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--config", nargs="+", default=list(ALL), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a smaller model and 12 steps")
    options = vars(parser.parse_args(arguments))
    names, out, quick = options.pop("config"), options.pop("out"), options.pop("quick")
    if quick:
        options |= {"layers": 4, "width": 96, "context": 64, "steps": 12}
    config = Config(**options)
    _check(config, names)
    return config, names, out


def _check(config: Config, names: list[str]) -> None:
    for name in ("layers", "width", "heads", "context", "batch", "steps"):
        if getattr(config, name) < 1:
            raise UsageError(f"--{name} is {getattr(config, name)}, but it must be at least 1")
    if config.steps < 5:
        raise UsageError(f"--steps is {config.steps}, but 5 are needed to measure and to time")
    if config.width % config.heads:
        raise UsageError(f"--width {config.width} is not a multiple of --heads {config.heads}")
    if not 0 <= config.dropout < 1:
        raise UsageError(f"--dropout is {config.dropout}, but it must be in [0, 1)")
    for name in names:
        if name not in ALL:
            known = ", ".join(repr(known) for known in ALL)
            raise UsageError(f"--config {name!r} is unknown. The configurations are {known}")
    if config.batch % 2 and ON_TWO_RANKS.intersection(names):
        raise UsageError(f"--batch is {config.batch}, but two ranks need an even number")
    if config.device not in ("cpu", "cuda"):
        raise UsageError(f"--device {config.device!r} is unknown. Give cpu or cuda")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda was asked for, but torch sees no CUDA device here")
    if config.data and not Path(config.data).exists():
        raise UsageError(
            f"--data {config.data} does not exist, but it must name a file or a folder"
        )


def load_text(config: Config) -> Tensor:
    """Read the text; it must be long enough to train and validate."""
    text = read_text(config.data) if config.data == "" or _has_bytes(config.data) else b""
    if len(text) < 4 * (config.context + 2):
        raise UsageError(
            f"--data gives {len(text)} bytes of text, but a context of {config.context} needs "
            f"{4 * (config.context + 2)}. Give more text or a smaller --context"
        )
    return text


def _has_bytes(data: str) -> bool:
    files = [Path(data)] if Path(data).is_file() else Path(data).rglob("*")
    return any(file.is_file() and file.stat().st_size for file in files)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an error into one line and exit code 2, and Ctrl-C into a short message."""
    try:
        yield
    except UsageError as error:
        print(f"compare_gpt: {error}.", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ncompare_gpt: stopped; the turns finished so far are on disk.", file=sys.stderr)
        raise SystemExit(130) from None


def compare(text: Tensor, config: Config, names: list[str], out: Path) -> None:
    """Train every chosen configuration and print its savings."""
    show = Progress(config, len(names))
    try:
        rows = train_in_turn(text, config, names, show.step)
    except KeyboardInterrupt:
        write(list(show.rows.values()), config, out)
        raise
    finally:
        show.close()
    write(rows, config, out)
    print(f"\n{table(rows)}")
    if ON_TWO_RANKS.intersection(names):
        print("sharded: one of two ranks, with half of the batch and a dropout of its own")
    print(f"\n{theory(rows, config)}")
    print("\nThe five most expensive modules of a checkpointed step, without their children:")
    print(profile_modules(Trainer("plain", text, config), out))
    print("\nWho holds the memory between forward and backward of a plain step:")
    print(page_of_memory(Trainer("plain", text, config), out))
    plot(rows, config, out)
    print(f"written to {out}/")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    with one_line_errors():
        config, names, out = parse(arguments)
        text = load_text(config)
        out.mkdir(parents=True, exist_ok=True)
        compare(text, config, names, out)


if __name__ == "__main__":
    main()
