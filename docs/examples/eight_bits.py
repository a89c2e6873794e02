"""AdamW with 8-bit moments and a scale for each block of 32 elements."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK, LR = 32, 0.01


class AdamW8bit(torch.optim.Optimizer):
    """AdamW over blocks of consecutive elements, so shards must end between blocks.

    Its state has one row per block, so that a checkpoint can be cut between rows.
    """

    @torch.no_grad()
    def step(self) -> None:
        """Step every parameter; the state is 8-bit integers and their scales."""
        for param in (p for group in self.param_groups for p in group["params"] if p.numel()):
            state, grad = self.state[param], param.grad.flatten()
            state["step"] = step = state.get("step", 0) + 1
            mean = torch.lerp(grad, unpack(state, "mean", grad), 0.9)
            root = torch.lerp(grad**2, unpack(state, "root", grad) ** 2, 0.99).sqrt()
            state["mean"], state["mean_scales"] = pack(mean)
            state["root"], state["root_scales"] = pack(root)
            rate = LR * (1 - 0.99**step) ** 0.5 / (1 - 0.9**step)
            param.mul_(1 - 0.1 * LR).sub_((rate * mean / (root + 1e-6)).view_as(param))


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers from -127 to 127, `(blocks, 32)`, and scales, `(blocks, 1)`."""
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (blocks / scales).round().to(torch.int8), scales


def unpack(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Restore packed values in the shape of `like`; zeros if there are none."""
    if name not in state:
        return like * 0
    return (state[name] * state[f"{name}_scales"]).flatten()[: len(like)]
