"""`torch.compile` and `torch.export` of a model in `checkpoint_`, beside torch's `checkpoint`.

    python docs/examples/compile_and_export.py

Claim: one graph without a break, which keeps what one with torch's own `checkpoint` keeps; its
gradients are eager's, every bit, and the exported program has the plain model's names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ckpt_wrap import checkpoint_


class Stack(nn.Module):
    """Three blocks, in torch's own checkpoint where `torchs` is set."""

    def __init__(self, *, torchs: bool = False) -> None:
        super().__init__()
        layers = ((nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.blocks, self.torchs = nn.ModuleList(nn.Sequential(*block) for block in layers), torchs

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.torchs else block(x)
        return x


def compiled_bytes(model: nn.Module) -> int:
    """A step of the compiled model; bytes that its forward leaves for its backward."""
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    given = {t.untyped_storage()._cdata for t in (x, *model.parameters())}
    kept = {t.untyped_storage()._cdata: t.nbytes for t in out.grad_fn.saved_tensors}
    out.square().sum().backward()
    return sum(count for storage, count in kept.items() if storage not in given)


x = torch.randn(64, 32)
models = {"plain": Stack(), "checkpoint_": Stack(), "torch": Stack(torchs=True)}
for model in models.values():
    model.load_state_dict(models["plain"].state_dict())
for block in models["checkpoint_"].blocks:
    checkpoint_(block)
kept = {name: compiled_bytes(model) for name, model in models.items()}
print(*(f"{name:14}{count / 1024:6.1f} KiB kept" for name, count in kept.items()), sep="\n")
assert kept["checkpoint_"] <= kept["torch"] < kept["plain"]

plain = models["plain"]
plain.zero_grad()
plain(x).square().sum().backward()  # eager
pairs = zip(models["checkpoint_"].parameters(), plain.parameters(), strict=True)
assert all(torch.equal(found.grad, right.grad) for found, right in pairs)
program = torch.export.export(models["checkpoint_"].eval(), (x,))
assert torch.equal(program.module()(x), plain(x))
assert list(program.state_dict) == list(plain.state_dict())
print(f"claim holds: one graph, {len(program.state_dict)} plain names, all gradients equal")
