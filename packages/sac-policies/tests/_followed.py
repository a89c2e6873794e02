"""Functions whose forwards follow steps, and what is known of those under `recompute_all`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sac_policies import recompute_all
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.engines.recipe.regions._at_edges import Value
from sac_policies.engines.recipe.regions._recorded import Replayed
from sac_policies.policies._unmatched import subject_of

from ._recipe import leaf, run

ALL = recompute_all()
W = leaf(8, 8)
ROWS, WIDTH = 64, 16
WEIGHTS = [leaf(WIDTH, WIDTH) for _ in range(4)]
BIAS, SCALE = leaf(WIDTH), leaf(WIDTH)


def llama(x: Tensor) -> Tensor:
    """Norms by hand, rotated halves, products and gates."""
    for w in WEIGHTS[:2]:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        one, other = (y @ w).view(4, -1, WIDTH).transpose(0, 1).chunk(2, -1)
        turned = torch.cat((-other, one), -1).transpose(0, 1).reshape(ROWS, WIDTH)
        x = x + F.silu(turned @ w) * y
    return x


def gpt(x: Tensor) -> Tensor:
    """Norms, projections of one product, attention, dropout."""
    for _ in range(2):
        y = F.layer_norm(x, (WIDTH,), SCALE, BIAS)
        query, key, value = (F.linear(y, torch.cat(WEIGHTS[:3]))).view(4, -1, 48).chunk(3, -1)
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.linear(made.reshape(ROWS, WIDTH), WEIGHTS[1], BIAS)
        x = x + F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), WEIGHTS[3], BIAS)).tanh()
    return x


def written(x: Tensor) -> Tensor:
    """What is written to in place, and read at edges before and after."""
    for w in WEIGHTS:
        y = (x @ w).relu_()
        x = (y + x).sin() * (y.exp() + 1.0).cos() + x.t().reshape(ROWS, WIDTH)
    return x


def in_views(x: Tensor) -> Tensor:
    """Kept products that are saved as views of theirs; masks; integers."""
    y = (x @ WEIGHTS[0]).view(4, -1, WIDTH).transpose(0, 1)
    z = (y * (y > 0)).sin() + (y.cos() * torch.arange(WIDTH)).cos()
    z = F.dropout(z, 0.0).reshape(ROWS, WIDTH) @ WEIGHTS[1]
    return (z.softmax(-1) + z).tanh() + (y.reshape(ROWS, WIDTH) @ WEIGHTS[2]).exp().log1p()


def waiting(x: Tensor) -> Tensor:
    """Two of three parts of a product are turned and saved, before the product is."""
    wide, half = torch.cat(WEIGHTS[:3]), WIDTH // 2
    for w in WEIGHTS[2:]:
        one, two, three = F.linear(x, wide).chunk(3, -1)
        one, two = (torch.cat((-each[:, half:], each[:, :half]), -1) for each in (one, two))
        x = x + (one.sin() * two.cos() * three.sin()) @ w
    return x


def shape_of(function: Callable[..., Any], *args: Any) -> Any:
    """What is known of a function's forwards with such inputs."""
    return known_of(ALL).repeats._shape(subject_of(function), habits_of(function), args)


def learnt(function: Callable[..., Tensor], *given: Tensor) -> None:
    """Have it followed once."""
    for _ in range(3):
        run(function, *given).sum().backward()
    assert shape_of(function, *given).followed == 1


def values(function: Callable[..., Any], *args: Any) -> list[Value]:
    """What is replayed, in order of first steps."""
    steps = shape_of(function, *args).steps
    return [what.value for _, _, what in steps if isinstance(what, Replayed)]


def changed(value: Value, **changes: Any) -> Value:
    """The same value but for these attributes."""
    other = copy.copy(value)
    for name, to in changes.items():
        setattr(other, name, to)
    return other
