"""PEFT LoRA on a frozen Llama with layers in `checkpoint_`, compared with transformers' option.

    python docs/examples/peft_lora.py

Claim: without `enable_input_require_grads`, adapters get gradients bit-identical to the plain
run's.
"""

from __future__ import annotations

import copy

import peft
import torch
import transformers
from kept import side_by_side

from ckpt_wrap import checkpoint_

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)
lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
plain = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).train()
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
ids = torch.randint(64, (2, 64))

for layer in ours.base_model.model.model.layers:
    checkpoint_(layer)

theirs.gradient_checkpointing_enable()
theirs.enable_input_require_grads()

models = {"plain": plain, "checkpoint_": ours, "transformers": theirs}
found = side_by_side(models, lambda model: model(input_ids=ids, labels=ids))
assert not found["checkpoint_"].differing
kept = [way.kept_bytes for way in found.values()]
assert kept[1] <= kept[2] < kept[0] / 2
trained = [param for param in ours.parameters() if param.grad is not None]
adapters, wanted = peft.get_peft_model_state_dict(ours), peft.get_peft_model_state_dict(plain)
assert list(adapters) == list(wanted) and len(trained) == len(adapters)
print(
    f"claim holds: {kept[0] / kept[1]:.1f} times less is kept, and the gradients of "
    f"{len(trained)} adapter weights are equal, every bit"
)
