"""`Trainer` over eight architectures of transformers, each layer in `checkpoint_`.

    python docs/examples/hf_architectures.py

Claim: trained weights are bit-identical to the plain run's; `gradient_checkpointing=True` keeps at
least as many bytes.
"""

import contextlib
import copy
import tempfile
import warnings

import torch
import transformers as hf
from kept import side_by_side
from torch import nn

from ckpt_wrap import checkpoint_

warnings.simplefilter("ignore")
torch.manual_seed(0)
text, classes = torch.randint(1, 128, (4, 64)), torch.tensor([0, 1, 0, 1])
INPUTS = {
    "input_ids": {"input_ids": text, "labels": text},
    "pixel_values": {"pixel_values": torch.rand(4, 3, 64, 64), "labels": classes},
    "input_features": {"input_features": torch.rand(4, 80, 128), "labels": text},
}
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 128}
HEADS = SIZE | {"num_attention_heads": 4}
START = {"vocab_size": 128, "d_model": 48, "pad_token_id": 0, "decoder_start_token_id": 0}
MODELS = {
    "LlamaForCausalLM": HEADS,
    "GPT2LMHeadModel": {"vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "BertForMaskedLM": HEADS,
    "T5ForConditionalGeneration": START | {"num_layers": 3},
    "ViTForImageClassification": HEADS | {"image_size": 64, "patch_size": 8},
    "WhisperForConditionalGeneration": START | {"max_source_positions": 64},
    "MixtralForCausalLM": HEADS | {"num_key_value_heads": 2},
    "MambaForCausalLM": SIZE,
}
CPU = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "max_steps": 2}
for title, settings in MODELS.items():
    plain = (make := getattr(hf, title))(make.config_class(**settings, use_cache=False)).train()
    models = {title: plain, "checkpoint_": copy.deepcopy(plain), "switch": copy.deepcopy(plain)}
    for path, part in models["checkpoint_"].named_modules():
        if isinstance(part, nn.ModuleList) and not any(map(str.isdigit, path.split("."))):
            for layer in part:
                checkpoint_(layer)
    inputs = INPUTS[make.main_input_name]
    rows = [{key: value[row] for key, value in inputs.items()} for row in range(4)]
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(None):
            args = hf.TrainingArguments(out, gradient_checkpointing=name == "switch", **CPU)
            hf.Trainer(model, args, train_dataset=rows).train()
    _, ours, theirs = side_by_side(models, lambda m, given=inputs: m(**given), turns=3).values()
    assert not ours.differing and ours.kept_bytes <= theirs.kept_bytes
    trained = models["checkpoint_"].state_dict()
    assert all(torch.equal(trained[name], right) for name, right in plain.state_dict().items())
print("claim holds: names, trained weights and gradients of all eight are equal, every bit")
