"""Train with accelerate, accumulation and clipping; blocks are in `checkpoint_`.

    python docs/examples/accelerate_loop.py

Claim: `prepare`, `accumulate` and `save_state` work on the unchanged model; weights equal the plain
run's, and a step keeps no more than with `gradient_checkpointing_enable()`.
"""

from __future__ import annotations

import copy
import tempfile

import torch
import transformers
from accelerate import Accelerator
from kept import side_by_side
from safetensors.torch import load_file

from ckpt_wrap import checkpoint_

torch.manual_seed(0)
size = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "use_cache": False}
config = transformers.GPT2Config(vocab_size=64, **size)
plain = transformers.GPT2LMHeadModel(config).train()  # with dropout
models = {"plain": plain, "checkpoint_": copy.deepcopy(plain), "switch": copy.deepcopy(plain)}
ids = torch.randint(64, (8, 16))
rows = [{"input_ids": row, "labels": row} for row in ids]

for block in models["checkpoint_"].transformer.h:
    checkpoint_(block)
models["switch"].gradient_checkpointing_enable()


def train(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Run two optimizer steps of two batches each; return the tensors that `save_state` writes."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        return load_file(f"{folder}/model.safetensors")


expected, saved, _ = (train(model) for model in models.values())
found = side_by_side(models, lambda model: model(input_ids=ids, labels=ids))
assert found["checkpoint_"].kept_bytes <= found["switch"].kept_bytes < found["plain"].kept_bytes / 2
assert saved.keys() == expected.keys()
assert all(torch.equal(saved[name], expected[name]) for name in expected)
print(f"claim holds: {len(saved)} tensors in both files of save_state are equal, every bit")
