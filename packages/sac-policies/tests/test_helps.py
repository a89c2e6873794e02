"""If nothing fits a budget, the error recommends remedies with their bytes."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn import functional as F

from sac_policies import fit_, in_slices
from sac_policies.budget import Infeasible, format_size

VOCABULARY, WIDTH, TOKENS = 2048, 16, 256


class Block(nn.Module):
    """A repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add a feed-forward network."""
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Few parameters and a large vocabulary; the loss can be computed in slices."""

    def __init__(self, slices: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.slices = nn.Linear(WIDTH, VOCABULARY), slices

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of losses."""
        for block in self.blocks:
            x = block(x)
        return (
            in_slices(self.loss_of, self.slices)(x, labels)
            if self.slices
            else self.loss_of(x, labels)
        )

    def loss_of(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum the losses of some tokens."""
        return F.cross_entropy(self.head(x), labels, reduction="sum")


BATCH = (torch.randn(TOKENS, WIDTH), torch.zeros(TOKENS, dtype=torch.int64))
LOGITS = 4 * TOKENS * VOCABULARY


def bytes_of(size: str) -> float:
    """Parse the output of `format_size`."""
    number, unit = size.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit]


def test_slices_of_logits_save_what_is_said() -> None:
    """With the loss in slices, the smallest peak falls by about the reported bytes."""
    whole, sliced = (fit_(Model(slices), BATCH, 1000) for slices in (0, 16))
    assert isinstance(whole, Infeasible)
    assert isinstance(sliced, Infeasible)
    said = re.search(r"in_slices\(function, 16\) over .* saves up to ([\d.]+ \w+)", whole.helps)
    assert said is not None
    assert bytes_of(said[1]) > 2 * LOGITS
    saved = whole.smallest_bytes - sliced.smallest_bytes
    assert 0.8 * bytes_of(said[1]) < saved < 1.05 * bytes_of(said[1])
    assert "in_slices" not in sliced.helps or bytes_of(said[1]) > saved


def test_fewer_tokens_that_are_said_to_fit_do() -> None:
    """The recommended number of tokens fits; only bytes that depend on tokens scale."""
    model = Model()
    smallest = fit_(model, BATCH, 1000)
    assert isinstance(smallest, Infeasible)
    budget = smallest.smallest_bytes * 3 // 4
    found = fit_(model, BATCH, budget)
    assert isinstance(found, Infeasible)
    said = re.search(r"with (\d+) % of the tokens it would fit", found.helps)
    assert said is not None
    fewer = int(TOKENS * int(said[1]) / 100)
    assert fit_(model, tuple(each[:fewer] for each in BATCH), budget + 4096)


def test_state_of_the_optimizer_and_shards_are_counted() -> None:
    """AdamW's state has twice the parameters' bytes; two ranks shard state and parameters."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    found = fit_(model, BATCH, 1000, optimizer=optimizer)
    assert isinstance(found, Infeasible)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert f"optimizer state in host memory saves {format_size(2 * nbytes)}" in found.helps
    assert f"sharding over 2 ranks saves {format_size(2 * nbytes)} on each" in found.helps
