"""`Trainer` of transformers over layers in `checkpoint_`, with dropout, saving and loading.

    python docs/examples/hf_trainer.py

Claim: the trained weights are those of the plain run, every bit, and so is what is saved.
"""

from __future__ import annotations

import copy
import tempfile
import warnings

import torch
import transformers

from ckpt_wrap import checkpoint_

warnings.simplefilter("ignore")
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=32)
plain = transformers.GPT2LMHeadModel(config)  # dropout 0.1 is the configuration's own
ours = copy.deepcopy(plain)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(128, (8, 16))]

for block in ours.transformer.h:
    checkpoint_(block)


def train(model: torch.nn.Module, folder: str) -> dict[str, torch.Tensor]:
    """Three steps; gives what `from_pretrained` reads of the saved model."""
    settings = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    trainer.save_model(folder)
    return transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()


with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
    expected, found = train(plain, one), train(ours, other)
assert list(found) == list(expected)
assert all(torch.equal(found[name], expected[name]) for name in expected)
print(f"claim holds: {len(found)} saved tensors of both runs are equal, every bit")
