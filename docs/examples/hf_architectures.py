"""Eight architectures of transformers, each layer in `checkpoint_`, beside transformers' switch.

    python docs/examples/hf_architectures.py

Claim: a step keeps no more than under that switch, with the plain model's names and gradients.
"""

from __future__ import annotations

import copy
import warnings

import torch
import transformers as hf
from kept import kept_bytes
from torch import nn

from ckpt_wrap import checkpoint_

warnings.simplefilter("ignore")
torch.manual_seed(0)
text, sound = torch.randint(1, 128, (4, 64)), torch.rand(4, 80, 128)
images, classes = torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 0, 1])
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 128}
HEADS = SIZE | {"num_attention_heads": 4}
START = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"], 0)
MODELS = {
    "LlamaForCausalLM": HEADS,
    "GPT2LMHeadModel": {"vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "BertForMaskedLM": HEADS,
    "T5ForConditionalGeneration": {"vocab_size": 128, "d_model": 32, "d_ff": 64} | START,
    "ViTForImageClassification": HEADS | {"image_size": 64, "patch_size": 8},
    "WhisperForConditionalGeneration": {"d_model": 48, "max_source_positions": 64} | START,
    "MixtralForCausalLM": HEADS | {"num_key_value_heads": 2},
    "MambaForCausalLM": SIZE,
}
for title, settings in MODELS.items():
    make = getattr(hf, title)
    plain = make(make.config_class(**settings, use_cache=False)).train()
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    for path, part in ours.named_modules():
        if isinstance(part, nn.ModuleList) and not any(map(str.isdigit, path.split("."))):
            for layer in part:
                checkpoint_(layer)
    theirs.gradient_checkpointing_enable()
    inputs = {"pixel_values": images} if "ViT" in title else {"input_ids": text}
    inputs = {"input_features": sound} if "Whisper" in title else inputs
    kept = []
    for model in (plain, ours, theirs):
        torch.manual_seed(1)  # the same dropout
        kept.append(kept_bytes(model, **inputs, labels=classes if "ViT" in title else text) / 1024)
    print("{:32}{:7.0f} KiB, {:5.0f} checkpoint_, {:5.0f} transformers".format(title, *kept))
    assert kept[1] <= kept[2] < kept[0]
    assert list(ours.state_dict()) == list(plain.state_dict())
    same = [(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True)]
    assert all(a is b if b is None else torch.equal(a, b) for a, b in same)
print("claim holds: the gradients of all eight are equal, every bit")
