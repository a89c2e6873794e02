"""`Trainer` of transformers over layers in `checkpoint_`, with dropout, saving and loading.

    python docs/examples/hf_trainer.py

Claim: trained weights and saved files are bit-identical to the plain run's; the same run with
`gradient_checkpointing=True` keeps at least as many bytes.
"""

from __future__ import annotations

import copy
import tempfile
import warnings

import torch
import transformers
from kept import side_by_side

from ckpt_wrap import checkpoint_

warnings.simplefilter("ignore")
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=32)
config.use_cache = False
plain = transformers.GPT2LMHeadModel(config)  # the default configuration has dropout 0.1
models = {"plain": plain, "checkpoint_": copy.deepcopy(plain), "switch": copy.deepcopy(plain)}
ids = torch.randint(128, (8, 16))

for block in models["checkpoint_"].transformer.h:
    checkpoint_(block)


def train(model: torch.nn.Module, folder: str, **options: bool) -> dict[str, torch.Tensor]:
    """Train three steps; return the tensors that `from_pretrained` reads of the saved model."""
    settings = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=3,
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    trainer.save_model(folder)
    return transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()


with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
    expected, saved = train(plain, one), train(models["checkpoint_"], other)
    train(models["switch"], other, gradient_checkpointing=True)
found = side_by_side(models, lambda model: model(input_ids=ids, labels=ids))
assert found["checkpoint_"].kept_bytes <= found["switch"].kept_bytes < found["plain"].kept_bytes / 2
assert list(saved) == list(expected)
assert all(torch.equal(saved[name], expected[name]) for name in expected)
print(f"claim holds: {len(saved)} saved tensors of both runs are equal, every bit")
