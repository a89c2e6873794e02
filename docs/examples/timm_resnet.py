"""A ResNet of timm with its blocks in `checkpoint_`, beside timm's own switch.

    python docs/examples/timm_resnet.py

Claim: batch norm's averages move once in a step, as in the plain model, every bit; with
`set_grad_checkpointing()` they move twice, because the forward runs twice.
"""

from __future__ import annotations

import copy

import timm
import torch
from kept import kept_bytes

from ckpt_wrap import checkpoint_

torch.manual_seed(0)
plain = timm.create_model("resnet18", num_classes=10).train()
ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
images = torch.randn(8, 3, 64, 64)

for stage in (ours.layer1, ours.layer2, ours.layer3, ours.layer4):
    for block in stage:
        checkpoint_(block)

theirs.set_grad_checkpointing()


def differing(model: torch.nn.Module) -> list[str]:
    """Gradients and buffers that are not the plain model's, bit by bit."""
    grads = {name: param.grad for name, param in plain.named_parameters()}
    right = {**grads, **dict(plain.named_buffers())}
    found = {name: param.grad for name, param in model.named_parameters()}
    found |= dict(model.named_buffers())
    return [name for name in right if not torch.equal(found[name], right[name])]


models = {"plain": plain, "checkpoint_": ours, "timm": theirs}
kept = {n: kept_bytes(lambda m=model: m(images).square().mean()) for n, model in models.items()}
for name, model in models.items():
    print(f"{name:14}{kept[name] / 2**20:8.2f} MiB kept, {len(differing(model)):3} tensors differ")

assert kept["checkpoint_"] < kept["plain"] * 0.6
assert differing(ours) == []
averages = [n for n in differing(theirs) if n.endswith(("mean", "var", "tracked"))]
assert averages == differing(theirs) != []
print(f"claim holds: no tensor differs; with timm's own, {len(averages)} averages do")
