"""A transformers Qwen3-MoE with router noise that no checkpoint restores.

    python docs/examples/moe_routing.py

Claim: in 100 steps gradients are bit-identical to the plain model's, and less than half of the
bytes is kept. torch's checkpoint runs the router again, which chooses other experts, so its
gradients are wrong.
"""

from __future__ import annotations

import copy
import warnings

import torch
import transformers
from kept import kept_bytes
from torch import nn
from torch.nn import functional as F

from ckpt_wrap import checkpoint_
from sac_policies import checkpoint, recompute_all

STEPS = 100
warnings.simplefilter("ignore")
torch.manual_seed(0)
size = {"vocab_size": 128, "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
experts = {"num_experts": 8, "num_experts_per_tok": 2}
config = transformers.Qwen3MoeConfig(**size, **heads, **experts, use_cache=False)
noise = torch.Generator()  # a separate generator, as in tests that compare runs


class NoisyRouter(nn.Module):
    """Chooses experts by noisy logits."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, weights and indices of the chosen experts."""
        logits = F.linear(hidden, self.weight)
        noisy = logits + torch.randn(logits.shape, generator=noise)
        weights, chosen = noisy.softmax(-1).topk(self.top_k, -1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


plain = transformers.Qwen3MoeForCausalLM(config).train()
for layer in plain.model.layers:
    layer.mlp.gate = NoisyRouter(layer.mlp.gate)
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
for layer in ours.model.layers:
    checkpoint_(layer, checkpoint_fn=checkpoint, policy=recompute_all())
theirs.gradient_checkpointing_enable({"use_reentrant": False})


def gradients(model: nn.Module, ids: torch.Tensor, step: int) -> list[torch.Tensor]:
    """Run a step with the noise of its number; return and clear the gradients."""
    noise.manual_seed(step)
    model(input_ids=ids, labels=ids).loss.backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    return found


wrong = 0
for step in range(STEPS):
    ids = torch.randint(config.vocab_size, (2, 32))
    wanted = gradients(plain, ids, step)
    assert all(map(torch.equal, gradients(ours, ids, step), wanted))
    try:
        wrong += not all(map(torch.equal, gradients(theirs, ids, step), wanted))
    except torch.utils.checkpoint.CheckpointError:
        theirs.zero_grad()
        wrong += 1
kept = [kept_bytes(model, input_ids=ids, labels=ids) for model in (plain, ours)]
assert wrong == STEPS
assert kept[1] < kept[0] / 2
print(f"torch's checkpoint: wrong gradients, or an error, in {wrong} of {STEPS} steps")
print(
    f"claim holds: gradients are equal in {STEPS} steps, every bit, and "
    f"{kept[0] / kept[1]:.1f} times less is kept"
)
