"""`Trainer` over a T5 in `checkpoint_`, beside `gradient_checkpointing=True` on the same model.

    python docs/examples/t5_trainer.py

Claim: encoder and decoder, with dropout, train to the plain run's weights, every bit, and a step
keeps no more than with `gradient_checkpointing=True`.
"""

from __future__ import annotations

import copy
import tempfile
import warnings

import torch
import transformers
from kept import kept_bytes

from ckpt_wrap import checkpoint_

warnings.simplefilter("ignore")
torch.manual_seed(0)
config = transformers.T5Config(
    vocab_size=128,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=3,
    num_heads=4,
    decoder_start_token_id=0,
    use_cache=False,
)
plain = transformers.T5ForConditionalGeneration(config)
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 128, (8, 16))]

for block in [*ours.encoder.block, *ours.decoder.block]:
    checkpoint_(block)


def train(model: torch.nn.Module, folder: str, **settings: object) -> int:
    """Three steps; what one step more keeps, bytes."""
    settings |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": []}
    arguments = transformers.TrainingArguments(folder, max_steps=3, learning_rate=0.01, **settings)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    return kept_bytes(model, **{key: torch.stack([r[key] for r in rows]) for key in rows[0]})


with tempfile.TemporaryDirectory() as out:
    kept = {"plain": train(plain, out), "checkpoint_": train(ours, out)}
    kept["transformers"] = train(theirs, out, gradient_checkpointing=True)
print(*(f"{name:14}{count / 1024:8.1f} KiB kept" for name, count in kept.items()), sep="\n")
assert kept["checkpoint_"] <= kept["transformers"] < kept["plain"] / 2
weights = plain.state_dict()
assert all(torch.equal(value, weights[name]) for name, value in ours.state_dict().items())
print(f"claim holds: {len(weights)} trained tensors are equal, every bit")
