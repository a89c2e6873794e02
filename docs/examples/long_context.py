"""A long sequence: layers checkpointed, their inputs offloaded, and the loss in slices.

    python docs/examples/long_context.py

Claim: a forward keeps less than a 20th of the plain forward's bytes, and gradients are the plain
model's up to the rounding of sums.
"""

from __future__ import annotations

import copy
import tempfile

import torch
import transformers
from kept import kept_bytes
from torch.nn import functional as F

from ckpt_wrap import checkpoint_layers_
from sac_policies import in_slices

torch.manual_seed(0)
size = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 6}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
config = transformers.LlamaConfig(**size, **heads, use_cache=False)
plain = transformers.LlamaForCausalLM(config).train()
model = copy.deepcopy(plain)
ids = torch.randint(config.vocab_size, (1, 2048))


def loss_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed losses of some tokens."""
    return F.cross_entropy(model.lm_head(hidden).float(), targets, reduction="sum")


def sliced() -> torch.Tensor:
    """Return the loss of the whole sequence, computing an eighth of the logits at a time."""
    hidden, targets = model.model(input_ids=ids).last_hidden_state[0, :-1], ids[0, 1:]
    return in_slices(loss_of, 8)(hidden, targets) / targets.numel()


with tempfile.TemporaryDirectory() as folder:
    # On an accelerator use offload=True, which means host memory. On a CPU, offload to files.
    print(checkpoint_layers_(model, offload=folder))
    kept = kept_bytes(sliced)
wanted = kept_bytes(plain, input_ids=ids, labels=ids)
for one, other in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
print(f"kept by a forward: {kept / 2**20:.2f} MiB, by the plain one: {wanted / 2**20:.2f} MiB")
assert kept < wanted / 20
print(f"claim holds: {wanted / kept:.0f} times less is kept, the same gradients")
