"""A key-value cache shared by a model's layers: recomputation reads the state before forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_wrap import _arguments, checkpoint_, offload_


@pytest.fixture(autouse=True)
def warned(monkeypatch):
    """Ignore the cache warning, which has a test here."""
    monkeypatch.setattr(_arguments, "_warned", found := {"Cache"})
    return found


class Layer:
    """One layer of a cache: appends keys to the cached ones."""

    def __init__(self) -> None:
        self.keys = None

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=1)
        return self.keys


class Cache:
    """A list of cache layers, created on first access."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, keys, index):
        while len(self.layers) <= index:
            self.layers.append(Layer())
        return self.layers[index].update(keys)


class Attention(nn.Module):
    """Appends keys to a cache, then reads all keys from it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, cache=None):
        keys = self.key(x)
        if cache is not None:
            keys = cache.update(keys, self.index)
        return x + torch.softmax(self.query(x) @ keys.mT, -1) @ keys


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(i) for i in range(3))

    def forward(self, x, cache=None):
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x


def _decoders(wrap):
    torch.manual_seed(0)
    plain, wrapped = Decoder(), Decoder()
    wrapped.load_state_dict(plain.state_dict())
    for i, layer in enumerate(wrapped.layers):
        wrapped.layers[i] = wrap(layer)
    return plain, wrapped


def _gradients(module, x, cache):
    module.zero_grad()
    module(x, cache).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.filterwarnings("always")
def test_cache_that_keeps_what_was_to_be_freed_is_warned_of_once(warned, recwarn):
    """One warning per module, line and class; none if the cache gets no tensor with a gradient."""
    warned.clear()
    _, wrapped = _decoders(checkpoint_)
    wrapped(torch.randn(2, 4, 8)).sum().backward()
    with torch.no_grad():
        wrapped(torch.randn(2, 4, 8), Cache())
    assert not recwarn.list
    for _ in range(2):
        wrapped(torch.randn(2, 4, 8), Cache()).sum().backward()
    (said,) = recwarn.list
    assert str(said.message) == (
        "ckpt_wrap.checkpoint_: module Attention stores a tensor that requires grad in an argument "
        "(Cache). The tensor stays in memory as long as the argument does, so checkpointing does "
        "not free it. Pass use_cache=False to a transformers model, or no cache, in training."
    )


def test_nested_regions_share_a_cache():
    """A checkpointed model of checkpointed layers."""
    plain, wrapped = _decoders(checkpoint_)
    checkpoint_(wrapped)
    x = torch.randn(2, 4, 8)
    expected = _gradients(plain, x, Cache())
    assert all(map(torch.equal, expected, _gradients(wrapped, x, cache := Cache())))
    assert [layer.keys.shape[1] for layer in cache.layers] == [4, 4, 4]


def test_offload_around_a_checkpoint_with_a_cache(tmp_path):
    """Tensors already in the cache are offloaded to the folder, as inputs are."""
    plain, wrapped = _decoders(checkpoint_)
    for layer in wrapped.layers:
        offload_(layer, to=tmp_path, min_bytes=1)
    x = torch.randn(2, 4, 8)
    for module in (plain, wrapped):
        module.cache = Cache()
        with torch.no_grad():
            module(x[:, :2], module.cache)
    expected = _gradients(plain, x, plain.cache)
    assert all(map(torch.equal, expected, _gradients(wrapped, x, wrapped.cache)))
