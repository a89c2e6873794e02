"""A UNet of diffusers with its blocks in `checkpoint_`, beside diffusers' own switch.

    python docs/examples/diffusers_unet.py

Claim: less than a third is kept, no more than by `enable_gradient_checkpointing()`; gradients are
the plain model's, every bit.
"""

from __future__ import annotations

import copy

import diffusers
import torch
from kept import kept_bytes

from ckpt_wrap import checkpoint_

torch.manual_seed(0)
plain = diffusers.UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(16, 32),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    norm_num_groups=4,
    attention_head_dim=4,
    cross_attention_dim=24,
).train()
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
latents, steps, text = torch.randn(4, 4, 16, 16), torch.arange(4), torch.randn(4, 6, 24)

for block in [*ours.down_blocks, ours.mid_block, *ours.up_blocks]:
    checkpoint_(block)

theirs.enable_gradient_checkpointing()


def loss_of(unet: torch.nn.Module) -> torch.Tensor:
    """The loss of one step."""
    return unet(latents, steps, encoder_hidden_states=text).sample.square().mean()


models = {"plain": plain, "checkpoint_": ours, "diffusers": theirs}
kept = {name: kept_bytes(lambda m=model: loss_of(m)) for name, model in models.items()}
for name, count in kept.items():
    print(f"{name:14}{count / 2**20:8.2f} MiB kept")

assert kept["checkpoint_"] <= kept["diffusers"]
assert kept["checkpoint_"] < kept["plain"] / 3
for (name, param), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
    assert torch.equal(param.grad, expected.grad), name
times = kept["plain"] / kept["checkpoint_"]
print(f"claim holds: {times:.1f} times less is kept, and all gradients are equal, every bit")
