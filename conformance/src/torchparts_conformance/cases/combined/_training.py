"""A small model, its training, and the application of all parts; all numbers derive from these.

Shapes: a batch is (BATCH, WIDTH); a block multiplies WIDTH -> HIDDEN -> WIDTH.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import nn

BATCH, WIDTH, HIDDEN, BLOCKS, STEPS = 8, 8, 32, 2, 3
# A product of (m, k) and (k, n) costs 2mkn operations; a block has two.
BLOCK_FLOPS = 2 * (2 * BATCH * WIDTH * HIDDEN)
PRODUCTS = [torch.ops.aten.addmm.default]
NAMES = [
    "",
    "0",
    "0.up",
    "0.act",
    "0.drop",
    "0.down",
    "1",
    "1.up",
    "1.act",
    "1.drop",
    "1.down",
    "2",
]


class Block(nn.Module):
    """Two products with an activation and dropout between."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's result to x; (BATCH, WIDTH) both."""
        return x + self.down(self.drop(self.act(self.up(x))))


def make_model(device: str = "cpu", dropout: float = 0.0) -> nn.Sequential:
    """Make the same model at every call: blocks 0 and 1, and a head 2."""
    torch.manual_seed(1)
    blocks = [Block(dropout) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2)).to(device)


def batch(step: int, device: str = "cpu") -> torch.Tensor:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH, generator=generator).to(device)


@dataclass
class Record:
    """Losses by step, and gradients and parameters after the last step, by name."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    params: dict[str, torch.Tensor] = field(default_factory=dict)


def train(model: nn.Module, device: str = "cpu", *, call=None, around=contextlib.nullcontext):
    """Train for STEPS steps of SGD. `call` replaces the model's call; `around` wraps each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    record = Record()
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with around():
            loss = (call or model)(batch(step, device)).square().mean()
            loss.backward()
        record.losses.append(loss.item())
        record.grads = {n: p.grad.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    record.params = {n: p.detach().clone() for n, p in model.named_parameters()}
    return record


def assert_same(record: Record, plain: Record, clean=lambda name: name) -> None:
    """Assert that two trainings are bit-identical."""
    assert record.losses == plain.losses
    for kind in ("grads", "params"):
        got = {clean(name): value for name, value in getattr(record, kind).items()}
        wanted = getattr(plain, kind)
        assert got.keys() == wanted.keys()
        differ = [name for name, value in wanted.items() if not torch.equal(got[name], value)]
        assert differ == [], f"{kind} differ"


def checkpoint_blocks(parts, model: nn.Sequential, policy=None) -> nn.Sequential:
    """Checkpoint each block in place with a selective policy."""
    for block in model[:BLOCKS]:
        parts.ckpt_wrap.checkpoint_(
            block, checkpoint_fn=parts.sac_policies.checkpoint, policy=policy
        )
    return model


def offload_blocks(parts, model: nn.Sequential) -> nn.Sequential:
    """Offload each block in place, also small values."""
    for block in model[:BLOCKS]:
        parts.ckpt_wrap.offload_(block, min_bytes=1)
    return model


class Seen:
    """Names of called modules by phase, without the root's name."""

    def __init__(self, parts, model: nn.Module) -> None:
        self.tracker = parts.mod_tracker.ModTracker(model)
        self.names: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def watching(self):
        """Record every module call of a step."""
        self.names.clear()
        self.tracker.register_user_hooks(pre_fw_hook=self._note)
        with self.tracker:
            yield
        self.tracker.clear_user_hooks()

    def _note(self, module, args) -> None:
        name = self.tracker.get_known_fqn(module).partition(".")[2]
        self.names.setdefault(str(self.tracker.phase), []).append(name)
