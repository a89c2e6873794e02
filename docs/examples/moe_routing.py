"""A Mixtral of transformers that keeps its routing and recomputes its experts.

    python docs/examples/moe_routing.py

Claim: `topk`, which says where each token goes, runs once a layer, not once more in backward as
with `gradient_checkpointing_enable()`; gradients are the plain model's, every bit.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import transformers
from kept import side_by_side
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_wrap import checkpoint_
from sac_policies import checkpoint

warnings.simplefilter("ignore")
torch.manual_seed(0)
size = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
config = transformers.MixtralConfig(**size, **heads, use_cache=False)
plain = transformers.MixtralForCausalLM(config).train()
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
ids = torch.randint(config.vocab_size, (2, 64))

for layer in ours.model.layers:
    checkpoint_(layer, checkpoint_fn=checkpoint, policy=["mlp.gate :: aten.mm"])

theirs.gradient_checkpointing_enable()


class Routing(TorchDispatchMode):
    """Counts how often tokens are given to experts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.topk.default
        return func(*args, **(kwargs or {}))


models, routed = {"plain": plain, "checkpoint_": ours, "transformers": theirs}, {}
for name, model in models.items():
    with Routing() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    routed[name] = counted.count
    print(f"{name}: tokens routed {routed[name]} times in a step")
found = side_by_side(models, lambda model: model(input_ids=ids, labels=ids))
assert routed["checkpoint_"] == routed["plain"] < routed["transformers"]
assert found["checkpoint_"].kept_bytes < found["plain"].kept_bytes / 2
assert not found["checkpoint_"].differing
print(f"claim holds: routed {routed['plain']} times, and all gradients are equal, every bit")
