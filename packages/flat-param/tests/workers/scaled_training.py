"""Train a transformer in float32, in bfloat16, and with parameters that are sent in float8."""

from __future__ import annotations

from typing import Any

import torch
from _harness import main, mean_over_ranks
from torch import Tensor, nn

import flat_param
from flat_param import MixedPrecision, Scaled

VOCABULARY, WIDTH, LENGTH, STEPS = 17, 64, 24, 80
BF16, F32 = torch.bfloat16, torch.float32


def float8(**settings: Any) -> MixedPrecision:
    """Computing in bfloat16, and summing in float32."""
    return MixedPrecision(BF16, reduce_dtype=F32, gather=Scaled(**settings))


WAYS = {
    "float32": None,
    "bfloat16": MixedPrecision(BF16, reduce_dtype=F32),
    "e4m3, blocks of 32": float8(),
    "e4m3, blocks of 128 with float32 scales": float8(block=128, scale_dtype=F32),
    "e5m2, blocks of 32": float8(dtype=torch.float8_e5m2),
    "e4m3, all parameters": float8(min_dims=0),
}


class Transformer(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def batch(step: int, rank: int) -> Tensor:
    """Sequences in which each token is a sum of the two before it, now and then another."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, VOCABULARY, (16, LENGTH + 1), generator=generator)
    noise = torch.rand(16, LENGTH + 1, generator=generator) < 0.05
    for place in range(2, LENGTH + 1):
        expected = (ids[:, place - 1] + ids[:, place - 2]) % VOCABULARY
        ids[:, place] = torch.where(noise[:, place], ids[:, place], expected)
    return ids


def train(precision: MixedPrecision | None, rank: int) -> dict[str, Any]:
    """Losses of all ranks, and what one has sent to gather."""
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        flat_param.fully_shard(layer, mixed_precision=precision)
    flat_param.fully_shard(model, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        ids = batch(step, rank)
        optimizer.zero_grad()
        found = model(ids[:, :-1]).to(F32)
        loss = nn.functional.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gathers = model.comm_counts()["all_gather"]
    return {
        "losses": mean_over_ranks(losses),
        "sent": gathers.wire_bytes / STEPS,
        "calls": gathers.calls / STEPS,
    }


def run(rank: int, world: int) -> dict[str, Any]:
    """Each way, from the same start on the same batches."""
    return {name: train(precision, rank) for name, precision in WAYS.items()}


if __name__ == "__main__":
    main(run)
