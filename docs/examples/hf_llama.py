"""A Llama of transformers with its layers in `checkpoint_`, compared with transformers' own option.

    python docs/examples/hf_llama.py

Claim: less than half of the bytes is kept; every gradient is bit-identical to the plain model's.
"""

from __future__ import annotations

import copy
import warnings

import torch
import transformers
from kept import side_by_side

from ckpt_wrap import checkpoint_

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
plain = transformers.LlamaForCausalLM(config).train()
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
ids = torch.randint(config.vocab_size, (2, 128))

for layer in ours.model.layers:
    checkpoint_(layer)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # transformers 5.23 prefers activation_checkpointing_enable
    theirs.gradient_checkpointing_enable()

models = {"plain": plain, "checkpoint_": ours, "transformers": theirs}
found = side_by_side(models, lambda model: model(input_ids=ids, labels=ids))

kept = {name: way.kept_bytes for name, way in found.items()}
assert kept["checkpoint_"] <= kept["transformers"] < kept["plain"] / 2
assert not found["checkpoint_"].differing
assert list(ours.state_dict()) == list(plain.state_dict())
times = kept["plain"] / kept["checkpoint_"]
print(f"claim holds: {times:.1f} times less is kept, and all gradients are equal, every bit")
