"""A UNet of diffusers with its blocks in `checkpoint_`, compared with diffusers' own option.

    python docs/examples/diffusers_unet.py

Claim: less than a third of the bytes is kept, no more than by `enable_gradient_checkpointing()`;
gradients are bit-identical to the plain model's.
"""

from __future__ import annotations

import copy

import diffusers
import torch
from kept import side_by_side

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
    """Return the loss of one step."""
    return unet(latents, steps, encoder_hidden_states=text).sample.square().mean()


models = {"plain": plain, "checkpoint_": ours, "diffusers": theirs}
found = side_by_side(models, loss_of)
kept = {name: way.kept_bytes for name, way in found.items()}
assert kept["checkpoint_"] <= kept["diffusers"]
assert kept["checkpoint_"] < kept["plain"] / 3
assert not found["checkpoint_"].differing
times = kept["plain"] / kept["checkpoint_"]
print(f"claim holds: {times:.1f} times less is kept, and all gradients are equal, every bit")
