"""`fit_` on one batch, then transformers' `Trainer` with padded batches and another loss.

    python docs/examples/fit_trainer.py

Claim: the plan for a batch without padding and the model's own loss also trains batches of other
lengths, with a mask and label smoothing; weights are bit-identical to the plain run's.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import torch
import transformers
from kept import side_by_side

from sac_policies import fit_

warnings.simplefilter("ignore")
torch.manual_seed(0)
size = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
config = transformers.LlamaConfig(**size, num_attention_heads=4, use_cache=False)
plain = transformers.LlamaForCausalLM(config)
ours = copy.deepcopy(plain).train()
ids = torch.randint(128, (4, 32))
print(found := fit_(ours, {"input_ids": ids, "labels": ids}, "80%"))
assert found

lengths = (5, 17, 9, 24, 12, 30, 3, 8)
rows = [{"input_ids": torch.randint(1, 128, (length,))} for length in lengths]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch padded to its longest text, with the attention mask."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Train four steps with label smoothing, which Trainer computes outside of the model."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output_dir": folder, "use_cpu": True, "max_steps": 4, "disable_tqdm": True}
        settings |= {"per_device_train_batch_size": 2, "save_strategy": "no", "report_to": []}
        args = transformers.TrainingArguments(**settings, label_smoothing_factor=0.1)
        transformers.Trainer(model, args, data_collator=padded, train_dataset=rows).train()
    return model.state_dict()


theirs = copy.deepcopy(plain)
theirs.gradient_checkpointing_enable()
expected, trained, _ = train(plain), train(ours), train(theirs)
models = {"plain": plain, "fit_": ours, "transformers": theirs}
assert not side_by_side(models, lambda m: m(**padded(rows)))["fit_"].differing
assert all(torch.equal(trained[name], expected[name]) for name in expected)
print(f"claim holds: {len(trained)} trained tensors are equal, every bit")
