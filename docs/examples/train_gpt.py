"""Train a small byte-level GPT on the source code of Python's own standard library.

    python docs/examples/train_gpt.py --config checkpointed_in_place --layers 8 --width 256
    torchrun --standalone --nproc-per-node 2 docs/examples/train_gpt.py --config sharded

Each configuration is a function; `compare_gpt.py` compares them. B batch, T context, W width.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ckpt_wrap import apply_activation_checkpointing, checkpoint_, offload_
from flat_param import flatten, fully_shard
from sac_policies import ATTENTION, MATMULS, checkpoint, fit_, profile, save_ops, solve


@dataclass(frozen=True)
class Config:
    """Options of a run; `batch` is that of all ranks together."""

    layers: int = 6
    width: int = 192
    heads: int = 6
    context: int = 128
    batch: int = 8
    dropout: float = 0.1
    steps: int = 40
    data: str = ""
    device: str = "cpu"
    rank: int = 0
    world_size: int = 1


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a LayerNorm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.act, self.dropout = F.gelu, nn.Dropout(config.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, W) to (B, T, W)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(self.act(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A pre-norm transformer over bytes with learned positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, config.width)
        self.positions = nn.Parameter(torch.randn(config.context, config.width) * 0.02)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.layers)])
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (B, T) int64 to logits of shape (B, T, 256)."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text(data: str) -> torch.Tensor:
    """Read a file or a folder, by default the standard library; uint8, shape (bytes,)."""
    path = Path(data or sysconfig.get_path("stdlib"))
    files = [path] if path.is_file() else sorted(path.rglob("*") if data else path.glob("*.py"))
    joined = bytearray().join(file.read_bytes() for file in files if file.is_file())
    return torch.frombuffer(joined, dtype=torch.uint8)


def batches(text: torch.Tensor, config: Config, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield inputs and targets, each (B, T) int64; every rank takes its part of the same batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - config.context - 1, (config.batch,), generator=generator)
        mine = starts[config.rank :: config.world_size, None]
        window = text[mine + torch.arange(config.context + 1)].long().to(config.device)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


adamw = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), fused=True)


def plain(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Keep every activation; the baseline."""
    return adamw(model.parameters())


def checkpointed(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Recompute every block in backward, in wrappers like torch's."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return adamw(model.parameters())


def checkpointed_in_place(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Recompute every block in backward, without a wrapper: no name or class changes."""
    for block in model.blocks:
        checkpoint_(block)
    return adamw(model.parameters())


def offload_to_disk(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Keep values that blocks save in memory-mapped files until backward."""
    for block in model.blocks:
        offload_(block, to=tempfile.gettempdir())
    return adamw(model.parameters())


def save_matmuls(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Keep the results of matrix products and attention; recompute the cheap rest."""
    for block in model.blocks:
        checkpoint_(block, checkpoint_fn=checkpoint, policy=save_ops(MATMULS, ATTENTION))
    return adamw(model.parameters())


def budget_half(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Let a solver choose what blocks keep: half of the bytes, with the least recomputation."""
    sample = torch.zeros(config.batch, config.context, config.width, device=config.device)
    half = solve(profile(model.blocks[0], sample.requires_grad_(), unit="flops"), "50%")
    for block in model.blocks:
        checkpoint_(block, checkpoint_fn=checkpoint, policy=half)
    return adamw(model.parameters())


def fitted(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Let fit_ change as few blocks as necessary for 80 % of plain's bytes, without AdamW's."""
    assert fit_(model, model.positions.new_zeros(config.batch, config.context).long(), "80%")
    return adamw(model.parameters())


def flat(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Put all parameters into one tensor, and step torch's fused AdamW over pieces of it."""
    return adamw(flatten(model).chunks())


def sharded(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Shard parameters, gradients and optimizer state over the ranks, one unit per block."""
    for module in [*model.blocks, model]:
        fully_shard(module)
    return adamw(model.parameters())


WAYS = [plain, checkpointed, checkpointed_in_place, offload_to_disk, save_matmuls, budget_half]
CONFIGURATIONS = {way.__name__: way for way in [*WAYS, fitted, flat, sharded]}


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats per byte, a scalar."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main() -> None:
    """Train in the chosen configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="plain", choices=CONFIGURATIONS)
    for field in fields(Config)[:-2]:
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    way = CONFIGURATIONS[options.pop("config")]
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        options |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    config = Config(**options)
    torch.manual_seed(0)
    model = GPT(config).to(config.device)
    optimizer = way(model, config)
    torch.manual_seed(1 + config.rank)
    batch = batches(read_text(config.data), config, seed=1)
    for step in range(config.steps):
        loss = loss_of(model, *next(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if config.rank == 0:
            print(f"step {step + 1}/{config.steps}  loss {loss.item():.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads must not outlive the process


if __name__ == "__main__":
    main()
