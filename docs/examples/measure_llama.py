"""Measure what a Llama of transformers keeps for backward, plain and in four other ways.

    python docs/examples/measure_llama.py            # writes docs/examples/llama.json

The weights are random, the configuration is a Llama's made small. Bytes are counted: every storage
that the forward made and that is alive when it has ended. The same code gives the same numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from kept import kept_bytes

import sac_policies
from ckpt_wrap import checkpoint_, offload_

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
    """What is done to a model, by the label it has in the chart."""
    policy = sac_policies.save_ops(sac_policies.MATMULS, sac_policies.ATTENTION)
    selective = {"checkpoint_fn": sac_policies.checkpoint, "policy": policy}
    return {
        "plain": lambda model: None,
        "sac-policies: keep products and attention": lambda model: [
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
    """A Llama with the same random weights each time."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).train()


def measure(folder: str) -> dict[str, Any]:
    """Kept bytes, and whether gradients are the plain ones, for each way."""
    ids = torch.randint(SIZE["vocab_size"], (BATCH, TOKENS))
    models = {label: build() for label in ways(folder)}
    for label, change in ways(folder).items():
        change(models[label])
    kept = {label: kept_bytes(model, input_ids=ids, labels=ids) for label, model in models.items()}
    grads = {label: [p.grad for p in model.parameters()] for label, model in models.items()}
    equal = {label: all(map(torch.equal, grads["plain"], found)) for label, found in grads.items()}
    rows = [{"way": w, "kept_bytes": kept[w], "equal": equal[w]} for w in models]
    return {
        "model": {"class": "LlamaForCausalLM", **SIZE, "batch": BATCH, "tokens": TOKENS},
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("llama.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(folder)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for row in result["rows"]:
        print(
            f"{row['way']:48} {row['kept_bytes'] / 2**20:8.2f} MiB"
            f"  gradients {'equal, every bit' if row['equal'] else 'DIFFER'}"
        )
