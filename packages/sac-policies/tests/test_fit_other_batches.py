"""A fitted model trains on what it was not fitted with."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sac_policies


class Block(nn.Module):
    """A gated layer with dropout and a residual; rows that a mask leaves out stay as they are."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask=None):
        """Rows in, rows out."""
        gate, value = self.up(F.layer_norm(x, x.shape[-1:])).chunk(2, dim=-1)
        y = F.dropout(self.down(F.silu(gate) * value), 0.1)
        return x + (y if mask is None else y * mask[:, None])


class Model(nn.Module):
    """A stack of blocks, and a buffer that nothing writes to."""

    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, mask=None, target=None):
        """Give `out`, and a loss where there is a target."""
        for block in self.blocks:
            x = block(x, mask)
        out = self.head(x) * self.scale
        return {"out": out} if target is None else {"out": out, "loss": F.mse_loss(out, target)}


def seeded(rows=512):
    """A model and the batch that it is fitted with."""
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(rows, 32), "target": torch.randn(rows, 4)}


def step(model, batch, loss=lambda out: out["loss"]):
    """Run a seeded forward and backward; give the loss and the gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    value = loss(model(**batch))
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def fitted(model, batch, budget="60%"):
    """What `fit_` says of a model that it was able to change."""
    found = sac_policies.fit_(model, batch, budget)
    assert found, "60 % of a step must be found on a stack of six equal blocks"
    return found


OTHERS = {
    "fewer rows": lambda x, y: ({"x": x[:100], "target": y[:100]}, None),
    "a mask": lambda x, y: ({"x": x, "target": y, "mask": (x[:, 0] > 0).to(x.dtype)}, None),
    "another loss": lambda x, y: ({"x": x}, lambda out: out["out"].logsumexp(-1).mean()),
    "half precision": lambda x, y: ({"x": x, "target": y}, None),
}


@pytest.mark.parametrize("other", OTHERS)
def test_fitted_model_trains_on_what_it_was_not_fitted_with(other):
    """No error; loss and gradients are those of the model without checkpointing, bitwise."""
    model, batch = seeded()
    plain = copy.deepcopy(model)
    fitted(model, batch)
    given, loss = OTHERS[other](batch["x"], batch["target"])
    half = other == "half precision"
    options = {} if loss is None else {"loss": loss}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        expected, found = step(plain, given, **options), step(model, given, **options)
    assert all(map(torch.equal, expected, found))
