"""Measure memory of a training step of a small Llama, plain and in four other ways.

    python docs/examples/measure_llama.py

Prints for each way: bytes kept between forward and backward, peak of a step without parameters and
gradients, and whether every gradient is bit-identical to plain's. Weights are random. Bytes are
counted, not sampled, so two runs print the same numbers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from kept import kept_bytes

import sac_policies
from ckpt_wrap import checkpoint_, offload_
from mod_tracker import trace

SIZE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}
BATCH, TOKENS = 4, 256


def ways(folder: str) -> dict[str, Callable[[Any], object]]:
    """Map the label of each way to the function that changes a model."""
    policy = sac_policies.save_ops(sac_policies.MATMULS, sac_policies.ATTENTION)
    selective = {"checkpoint_fn": sac_policies.checkpoint, "policy": policy}
    return {
        "plain": lambda model: None,
        "sac-policies: keep matmuls and attention": lambda model: [
            checkpoint_(layer, **selective) for layer in model.model.layers
        ],
        "transformers: gradient_checkpointing_enable()": lambda model: (
            model.gradient_checkpointing_enable()
        ),
        "ckpt-wrap: checkpoint_(layer)": lambda model: [
            checkpoint_(layer) for layer in model.model.layers
        ],
        "ckpt-wrap: offload_(layer, to=folder), too": lambda model: [
            offload_(checkpoint_(layer), to=folder) for layer in model.model.layers
        ],
    }


def build() -> Any:
    """Build a Llama; every call gives the same random weights."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).train()


def peak_bytes(model: Any, **batch: Any) -> int:
    """Return the largest number of bytes that one step allocates at once, without gradients."""
    with trace(model, memory=True) as report:
        model(**batch).loss.backward()
    events = json.loads(report.to_json())["traceEvents"]
    return max(event["args"]["live bytes"] for event in events if event["name"] == "memory of cpu")


def measure(folder: str) -> list[dict[str, Any]]:
    """Return one row for each way: `way`, `kept_bytes`, `peak_bytes`, `equal`."""
    ids = torch.randint(SIZE["vocab_size"], (BATCH, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    rows, plain = [], []
    for label, change in ways(folder).items():
        model = build()
        change(model)
        kept = kept_bytes(model, **batch)
        grads = [param.grad.clone() for param in model.parameters()]
        plain = plain or grads
        for param in model.parameters():
            param.grad.zero_()
        peak = peak_bytes(model, **batch)
        equal = all(map(torch.equal, plain, grads))
        rows.append({"way": label, "kept_bytes": kept, "peak_bytes": peak, "equal": equal})
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'MiB':48} {'kept':>8} {'peak':>8}  gradients")
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(folder):
            kept, peak = (row[name] / 2**20 for name in ("kept_bytes", "peak_bytes"))
            equal = "equal, every bit" if row["equal"] else "DIFFERENT"
            print(f"{row['way']:48} {kept:8.1f} {peak:8.1f}  {equal}")
