"""A timm ResNet with its blocks in `checkpoint_`, compared with timm's own option.

    python docs/examples/timm_resnet.py

Claim: batch norm statistics advance once per step, bit-identical to the plain model. With
`set_grad_checkpointing()` they advance twice, because the forward runs twice.
"""

from __future__ import annotations

import copy

import timm
import torch
from kept import side_by_side

from ckpt_wrap import checkpoint_

torch.manual_seed(0)
plain = timm.create_model("resnet18", num_classes=10).train()
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
images = torch.randn(8, 3, 64, 64)

for stage in (ours.layer1, ours.layer2, ours.layer3, ours.layer4):
    for block in stage:
        checkpoint_(block)

theirs.set_grad_checkpointing()


models = {"plain": plain, "checkpoint_": ours, "timm": theirs}
found = side_by_side(models, lambda model: model(images).square().mean(), turns=3)
assert found["checkpoint_"].kept_bytes < found["plain"].kept_bytes * 0.6
assert not found["checkpoint_"].differing
differing = found["timm"].differing
averages = [name for name in differing if name.endswith(("mean", "var", "tracked"))]
assert len(averages) == len(differing) > 0
print(f"claim holds: no tensor differs; with timm's own, {len(averages)} averages do")
