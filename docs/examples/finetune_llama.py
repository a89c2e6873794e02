"""Fine-tune a Llama with transformers' Trainer, LoRA and a memory budget.

    python docs/examples/finetune_llama.py

Claim: the step stays within 70 % of the plain peak, and adapters train to the plain run's weights.
"""

from __future__ import annotations

import copy
import tempfile

import peft
import torch
import transformers

from sac_policies import fit_

torch.manual_seed(0)
size = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
config = transformers.LlamaConfig(**size, num_attention_heads=4, use_cache=False)
model = transformers.LlamaForCausalLM(config)  # or from_pretrained
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
plain = copy.deepcopy(model)
texts = [{"input_ids": (ids := torch.randint(128, (64,))), "labels": ids} for _ in range(16)]

batch = transformers.default_data_collator(texts[:4])
print(found := fit_(model.train(), batch, "70%"))  # or "60 GiB", or "device" on an accelerator
assert found and found.peak_bytes <= 0.7 * found.plain_bytes


def train(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Train for four steps; return the adapters."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output_dir": folder, "max_steps": 4, "per_device_train_batch_size": 4}
        settings |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
        args = transformers.TrainingArguments(**settings)
        transformers.Trainer(model, args, train_dataset=texts).train()
    return peft.get_peft_model_state_dict(model)


trained, wanted = train(model), train(plain)
assert all(torch.equal(trained[name], wanted[name]) for name in wanted)
print(f"claim holds: {len(trained)} adapter weights are equal, every bit, within 70 % of the peak")
