"""Compare ways to checkpoint the layers of a transformers model, in one run.

    python docs/examples/compare_layers.py

Prints for each way: bytes kept between forward and backward, peak of a step without parameters and
gradients, step time relative to plain, and whether every gradient is bit-identical to plain's.
Ways take their steps in turns; times are medians. Offload to host memory needs an accelerator, and
so does TRL's `OffloadActivations`, which is included if TRL is installed. accelerate's FSDP plugin
applies torch's wrappers.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from kept import in_turn, kept_bytes
from measure_llama import BATCH, SIZE, TOKENS, build, peak_bytes
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from ckpt_wrap import checkpoint_layers_


def wrapped_by_torch(model: Any, offload: bool = False) -> None:
    """Wrap each decoder layer as accelerate does."""

    def wrapped(layer: Any) -> Any:
        inner = torchs.checkpoint_wrapper(layer, preserve_rng_state=False)
        return torchs.offload_wrapper(inner) if offload else inner

    layers = set(model.model.layers)
    torchs.apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapped, check_fn=lambda module: module in layers
    )


def ways(folder: str) -> dict[str, Callable[[Any], object]]:
    """Map the label of each way to the function that changes a model."""
    found: dict[str, Callable[[Any], object]] = {"plain": lambda model: None}
    for every in (1, 2):
        found[f"transformers, every_n_layers={every}"] = lambda model, every=every: (
            model.activation_checkpointing_enable(every_n_layers=every)
        )
        found[f"checkpoint_layers_, every={every}"] = partial(checkpoint_layers_, every=every)
    if torch.accelerator.is_available():
        found["transformers, offload=True"] = lambda model: model.activation_checkpointing_enable(
            offload=True
        )
        found["checkpoint_layers_, offload=True"] = partial(checkpoint_layers_, offload=True)
        found["accelerate, checkpointing and offload"] = partial(wrapped_by_torch, offload=True)
    found["checkpoint_layers_, offload=folder"] = partial(checkpoint_layers_, offload=folder)
    found["accelerate, checkpointing"] = wrapped_by_torch
    return found


def offloaded_by_trl() -> AbstractContextManager[Any] | None:
    """Add TRL's context around a step, if TRL is installed and there is an accelerator."""
    if not torch.accelerator.is_available():
        return None
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError:
        return None
    return OffloadActivations()


def step(model: Any, ids: torch.Tensor, around: AbstractContextManager[Any], _: int) -> None:
    """Run forward and backward."""
    model.zero_grad()
    with around:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()


def measure(folder: str) -> list[dict[str, Any]]:
    """Return one row for each way: `way`, `kept_bytes`, `peak_bytes`, `time`, `equal`."""
    ids = torch.randint(SIZE["vocab_size"], (BATCH, TOKENS))
    plain, rows, steps, wanted = build(), [], {}, []
    for label, change in ways(folder).items():
        model = copy.deepcopy(plain)
        change(model)
        steps[label] = partial(step, model, ids, nullcontext())
        kept = kept_bytes(model, input_ids=ids, labels=ids)
        grads = [param.grad.clone() for param in model.parameters()]
        wanted = wanted or grads
        equal = all(map(torch.equal, wanted, grads))
        peak = peak_bytes(model, input_ids=ids, labels=ids)
        rows.append({"way": label, "kept_bytes": kept, "peak_bytes": peak, "equal": equal})
    if offloaded_by_trl() is not None:
        label = "TRL, OffloadActivations"
        steps[label] = partial(step, copy.deepcopy(plain), ids, offloaded_by_trl())
        rows.append({"way": label})
    times = in_turn(steps)
    return [{**row, "time": statistics.median(times[row["way"]])} for row in rows]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'MiB':36} {'kept':>8} {'peak':>8} {'time':>6}  gradients")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(folder)
    for row in rows:
        kept, peak = (row.get(name, float("nan")) / 2**20 for name in ("kept_bytes", "peak_bytes"))
        equal = {True: "equal", False: "DIFFERENT", None: ""}[row.get("equal")]
        print(f"{row['way']:36} {kept:8.1f} {peak:8.1f} {row['time']:6.2f}  {equal}")
