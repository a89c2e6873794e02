"""Modules that read and write buffers, each in a way of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from ckpt_wrap import is_recomputing

LARGE = 1 << 17  # numel of what is not kept unless it is written


class Layer(nn.Module):
    """A linear layer with a buffer; what is done with the buffer is each test's own."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.register_buffer("b", torch.zeros(features))

    def forward(self, x):
        y = self.use(self.l(x))
        return torch.tanh(y) * y

    def use(self, y):
        raise NotImplementedError


class AddThenRead(Layer):
    def use(self, y):
        self.b.add_(1)
        return y + self.b


class ReadThenAdd(Layer):
    def use(self, y):
        y = y + self.b
        self.b.add_(1)
        return y


class Centre(Layer):
    """An average as in DINO."""

    def use(self, y):
        centred = y - self.b
        with torch.no_grad():
            self.b.lerp_(y.mean(0), 0.1)
        return centred


class Rebound(Layer):
    def use(self, y):
        y = y + self.b
        self.b = self.b * 0.9 + 1
        return y


class FromNone(Layer):
    """A cache that is made by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None)

    def use(self, y):
        scale = 1.0 if self.cache is None else 2.0
        self.cache = y.detach().mean(0)
        return y * scale + self.cache


class ThroughData(Layer):
    def use(self, y):
        y = y + self.b
        self.b.data += 1
        return y


class Large(Layer):
    """A buffer that is not copied unless it is known to be written."""

    def __init__(self) -> None:
        super().__init__(LARGE)

    def use(self, y):
        y = y + self.b[:8]
        self.b.add_(1)
        return y


class NotANumber(Layer):
    """A buffer with NaN that is read only, and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nan", torch.full((8,), torch.nan))

    def use(self, y):
        y = y + self.b + self.nan.nan_to_num()
        self.b.add_(1)
        return y


class Codebook(Layer):
    """Vector quantization with codes that are averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("started", torch.tensor(False))

    def use(self, y):
        if not self.started:
            self.codes.copy_(y.detach()[:4])
            self.started.fill_(True)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest]
        with torch.no_grad():
            for code in range(4):
                if (nearest == code).any():
                    self.codes[code].lerp_(y[nearest == code].mean(0), 0.3)
        return y * quantized + ((y - quantized) ** 2)


class Tied(Layer):
    """One buffer at two places: written at one, read at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.l.register_buffer("same", self.b)

    def use(self, y):
        self.b.add_(1)
        return y + self.l.same


class GuardsAnother(Layer):
    """Guards what is no buffer, and then has a layer that writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Centre()
        self.steps = 0

    def use(self, y):
        if not is_recomputing():
            self.steps += 1
        return self.inner(y) + self.b


def spectral():
    """Vectors of a power iteration, advanced by each forward."""
    return nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh())


def batch_norm():
    """A cumulative average, which is read before it is written."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh())


MODULES = [
    AddThenRead,
    ReadThenAdd,
    Centre,
    Rebound,
    FromNone,
    ThroughData,
    Large,
    NotANumber,
    Codebook,
    Tied,
    GuardsAnother,
    spectral,
    batch_norm,
]
