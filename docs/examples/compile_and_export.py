"""`torch.compile` and `torch.export` of a model in `checkpoint_`, next to torch's `checkpoint`.

    python docs/examples/compile_and_export.py

Claim: one graph without a break keeps as many bytes as with torch's `checkpoint`; gradients are
bit-identical to eager's, and the exported program has the plain model's names.
"""

from collections.abc import Callable

import torch
from kept import differing, in_turn, ratio
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ckpt_wrap import checkpoint_


class Stack(nn.Module):
    """Three blocks, with torch's `checkpoint` if `torchs` is set."""

    def __init__(self, *, torchs: bool = False) -> None:
        super().__init__()
        layers = ((nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.blocks, self.torchs = nn.ModuleList(nn.Sequential(*block) for block in layers), torchs

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.torchs else block(x)
        return x


def step(model: nn.Module, run: Callable[[Tensor], Tensor]) -> int:
    """Run forward and backward; return the bytes that the forward graph keeps for backward."""
    model.zero_grad()
    out = run(x)
    given = {t.untyped_storage()._cdata for t in (x, *model.parameters())}
    kept = {t.untyped_storage()._cdata: t.nbytes for t in getattr(out.grad_fn, "saved_tensors", ())}
    out.square().sum().backward()
    return sum(count for storage, count in kept.items() if storage not in given)


x, eager = torch.randn(64, 32), Stack()
models = {"plain": Stack(), "checkpoint_": Stack(), "torch": Stack(torchs=True)}
for model in models.values():
    model.load_state_dict(eager.state_dict())
for block in models["checkpoint_"].blocks:
    checkpoint_(block)
runs = {n: torch.compile(m, fullgraph=True, backend="aot_eager") for n, m in models.items()}
times = in_turn({n: lambda _, n=n: step(models[n], runs[n]) for n in runs})
kept, _ = {n: step(models[n], runs[n]) for n in runs}, step(eager, eager)
for name, model in models.items():
    assert not differing(model, eager)
    print(f"{name:14}{kept[name] / 1024:6.1f} KiB kept, {ratio(times[name])}, gradients equal")
assert kept["checkpoint_"] <= kept["torch"] < kept["plain"]
program = torch.export.export(models["checkpoint_"].eval(), (x,))
assert torch.equal(program.module()(x), eager(x))
assert list(program.state_dict) == list(eager.state_dict())
print(f"claim holds: one graph, {len(program.state_dict)} plain names, all gradients equal")
