"""Offload: which storages are copied out, how often, and that gradients do not change."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_wrap import (
    OffloadStats,
    _offload_scheduler,
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_stats,
)
from ckpt_wrap._offloaded_storage import Stored


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(x))
        return self.norm(x + nn.functional.dropout(self.down(hidden), 0.5))


class Reuse(nn.Module):
    """Saves x three times, tanh(x) once, and a transposed view of x: two storages."""

    def forward(self, x):
        return torch.sin(x) + torch.cos(x) + torch.tanh(x) + (x.t() @ x).sum()


class Gates(nn.Module):
    """Parts of one storage with separate version counters, modified in place in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x):
        a, b = self.up(x).unsafe_chunk(2, -1)
        return a.sigmoid_() * b.tanh_()


class Save(torch.autograd.Function):
    """Saves a tensor."""

    @staticmethod
    def forward(ctx, anchor, tensor):
        ctx.save_for_backward(tensor)
        return anchor.clone()


class Saves(nn.Module):
    def forward(self, anchor, tensor):
        return Save.apply(anchor, tensor)


GATED = {
    "GRU": lambda: nn.GRU(16, 16, 1),
    "GRUCell": lambda: nn.GRUCell(16, 16),
    "LSTMCell": lambda: nn.LSTMCell(16, 16),
    "unsafe_chunk": Gates,
}


def _blocks(count=4):
    torch.manual_seed(1)
    return nn.Sequential(*[Feed() for _ in range(count)])


@pytest.mark.parametrize("kind", GATED)
def test_parts_with_own_versions_keep_their_values(tmp_path, kind):
    """A part that changed in place is not served from a copy made for another part."""
    torch.manual_seed(0)
    plain = GATED[kind]()
    model = offload_(copy.deepcopy(plain), to=tmp_path, min_bytes=1)
    x = torch.randn(8, 16)
    for module in (plain, model):
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    assert offload_stats(model).copies_out > 0
    for right, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(right.grad, found.grad)


@pytest.mark.parametrize(
    "order", ["offload", "offload after checkpoint", "checkpoint after offload"]
)
def test_gradients_are_those_of_the_plain_model(tmp_path, gradients, equal, order):
    """Bit-identical in two steps and in every order of the two layers; nothing remains."""
    plain, model = _blocks(), _blocks()
    for block in model:
        if order == "offload after checkpoint":
            checkpoint_(block)
        offload_(block, to=tmp_path)
        if order == "checkpoint after offload":
            checkpoint_(block)
    x = torch.randn(32, 16, requires_grad=True)
    for _ in range(2):
        assert equal(gradients(plain, lambda m: m(x), x), gradients(model, lambda m: m(x), x))
    stats = offload_stats(model)
    assert stats.bytes_away == 0
    assert stats.copies_in == stats.copies_out > 0
    if order != "offload":  # saved values inside are recomputed, so only the inputs are offloaded
        assert stats.copies_out == 2 * len(model)
        assert stats.bytes_out == stats.copies_out * x.nbytes
    assert not list(tmp_path.iterdir())


def test_each_storage_leaves_once_and_weights_never(tmp_path):
    """Copies equal the distinct eligible storages, and byte counts are exact."""
    module = offload_(Reuse(), to=tmp_path)
    x = torch.randn(16, 16, requires_grad=True)
    loss = module(x).sum()
    assert offload_stats(module) == OffloadStats(
        copies_out=2, bytes_out=2 * 1024, shared=3, bytes_away=2048, peak_bytes_away=2048
    )
    loss.backward()
    linear = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    loss = offload_(linear, to=tmp_path, min_bytes=0)(x).sum()
    stats = offload_stats(linear)
    assert stats.kept == 4  # both layers' weights and the running statistics
    assert stats.copies_out == 4  # x, what the linear layer returns, and two batch statistics
    loss.backward()


def test_weights_of_other_modules_stay_too(tmp_path):
    """A parameter passed as an argument, such as a tied weight, is not offloaded."""

    class Tied(nn.Module):
        def forward(self, x, weight):
            return nn.functional.linear(x, weight)

    module = offload_(Tied(), to=tmp_path, min_bytes=1)
    x = torch.randn(4, 16, requires_grad=True)
    module(x, nn.Parameter(torch.randn(8, 16))).sum().backward()
    assert offload_stats(module).bytes_out == 4 * 16 * 4


def test_a_small_view_of_a_storage_costs_the_storage_and_no_more(tmp_path):
    """An expanded tensor is copied with the bytes of its storage, not of its shape."""

    class Expand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000, 4))

        def forward(self, x):
            return x.expand(1000, 4) * self.weight

    module = offload_(Expand(), to=tmp_path, min_bytes=0)
    module(torch.randn(1, 4)).sum().backward()
    assert offload_stats(module).bytes_out == 16


def test_strides_dtype_offset_and_subclass_come_back(tmp_path):
    """Backward gets tensors with the saved layout and type."""

    class Tagged(torch.Tensor):
        pass

    saved = {
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "slice": torch.randn(10, 10, dtype=torch.float64)[2:8:2, 1::3],
        "subclass": torch.randn(8).as_subclass(Tagged),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0),
        "bool": torch.ones(3, 3, dtype=torch.bool),
    }
    module = offload_(Saves(), to=tmp_path, min_bytes=0)
    anchor = torch.ones((), requires_grad=True)
    for name, before in saved.items():
        out = module(anchor, before)
        (after,) = out.grad_fn.saved_tensors
        assert type(before) is type(after), name
        assert before.dtype == after.dtype, name
        assert before.stride() == after.stride(), name
        assert before.storage_offset() == after.storage_offset(), name
        assert torch.equal(before, after), name
    assert offload_stats(module).copies_out == 4
    assert offload_stats(module).kept == 2  # the conjugate and the empty tensor


def test_small_tensors_stay(tmp_path):
    """A storage below `min_bytes` is kept."""
    module = offload_(Reuse(), to=tmp_path, min_bytes=1025)
    module(torch.randn(16, 16, requires_grad=True)).sum().backward()
    assert offload_stats(module).copies_out == 0
    assert offload_stats(module).kept == 5


def test_sources_are_freed_in_forward_and_copies_after(tmp_path):
    """Offloaded device memory is freed before backward; dropping the graph drops the copies."""
    gc.collect()
    module = offload_(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), to=tmp_path)
    kept = []
    module[1].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    loss = module(torch.randn(64, 16)).sum()
    assert kept[0]() is None
    assert offload_stats(module).bytes_away > 0
    del loss
    assert offload_stats(module).bytes_away == 0


def test_a_lazy_layer_below_may_get_its_parameters_in_the_call(tmp_path):
    """The first forward of a model with lazy layers is offloaded like any other."""
    model = offload_(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LazyLinear(1)), to=tmp_path)
    model(torch.randn(128, 4)).sum().backward()
    assert offload_stats(model).copies_out == 2  # the input and the result of tanh


def test_offload_inside_a_checkpointed_module_has_nothing_to_do(tmp_path, gradients, equal):
    """A checkpointed module keeps no activations, so offload of its children copies nothing."""
    plain = nn.Sequential(Feed(), Feed())
    model = copy.deepcopy(plain)
    offload_(model[0], to=tmp_path)
    checkpoint_(model)
    x = torch.randn(32, 16, requires_grad=True)
    assert equal(gradients(plain, lambda m: m(x), x), gradients(model, lambda m: m(x), x))
    assert offload_stats(model) == OffloadStats()


def test_tensor_subclasses_made_of_tensors_are_taken_apart(tmp_path, two_parts):
    """A wrapper subclass is copied out part by part and restored as one tensor."""
    module = offload_(Saves(), to=tmp_path, min_bytes=0)
    x = torch.randn(8, 8)
    out = module(torch.ones((), requires_grad=True), two_parts(x, x + 1))
    (back,) = out.grad_fn.saved_tensors
    assert type(back) is two_parts
    assert torch.equal(back.b, x + 1)
    assert offload_stats(module).copies_out == 2


def test_tensors_without_bytes_of_their_own_stay(tmp_path):
    """Fake tensors pass through an offloaded module, and nothing is written."""
    with FakeTensorMode():
        module = offload_(nn.Tanh(), to=tmp_path, min_bytes=1)
        module(torch.randn(16, 16, requires_grad=True)).sum().backward()
    assert offload_stats(module).copies_out == 0


def test_a_tensor_without_memory_stays(tmp_path):
    """Forward-mode differentiation saves zero tangents, which have none."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    offload_(block, to=tmp_path, min_bytes=1)
    x = torch.linspace(-1, 1, 16).view(2, 8)
    with forward_ad.dual_level():
        y = block(forward_ad.make_dual(x, torch.ones_like(x)))
        forward_ad.unpack_dual(y).tangent.square().sum().backward()
    assert block[0].weight.grad is not None


def test_a_tensor_that_is_still_leaving_is_read_where_it_is(tmp_path, monkeypatch):
    """The source is used until a later call has waited for its copy."""
    monkeypatch.setattr(Stored, "copied", lambda _: False)  # a copy that takes long
    module = offload_(nn.Tanh(), to=tmp_path)
    x = torch.linspace(-1, 1, 1024, requires_grad=True)
    for calls_after, copies_in in ((0, 0), (1, 1)):
        result = module(x)
        for _ in range(calls_after):
            module(x)
        before = offload_stats(module).copies_in
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient, torch.autograd.grad(torch.tanh(x).sum(), x)[0])
        assert offload_stats(module).copies_in - before == copies_in


@pytest.mark.parametrize("room", [0, 2, 5])
def test_bytes_in_flight_keep_to_their_bound(tmp_path, monkeypatch, room):
    """Within one call, sources beyond the bound wait for their copies, oldest first."""
    monkeypatch.setattr(Stored, "copied", lambda _: False)
    monkeypatch.setattr(_offload_scheduler, "INFLIGHT_BYTES", room * 4096)
    layers = nn.Sequential(*[nn.Tanh() for _ in range(5)])
    results = []
    for layer in layers:
        layer.register_forward_hook(
            lambda m, args, out: results.append(StorageWeakRef(out.untyped_storage()))
        )
    module = offload_(nn.Sequential(layers, nn.Linear(1024, 1)), to=tmp_path)
    loss = module(torch.linspace(-1, 1, 1024)[None].requires_grad_()).sum()
    held = [not result.expired() for result in results]
    del loss
    assert held == [False] * (5 - room) + [True] * room


def test_statistics_count_a_module_once(tmp_path):
    """A module that forwards attribute access to its child is not counted as the child."""

    class Holds(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return self.inner(x)

    for wrap in (Holds, checkpoint_wrapper):
        inner = offload_(nn.Tanh(), to=tmp_path, min_bytes=1)
        inner(torch.randn(16, 16, requires_grad=True))
        assert offload_stats(wrap(inner)) == offload_stats(inner)


def test_counts_of_all_below_are_added_up(tmp_path):
    """Peaks are summed too and give an upper bound; modules without offload count as zero."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.Sequential(nn.Tanh()))
    parts = [model[0], model[2][0]]
    for part in parts:
        offload_(part, to=tmp_path, min_bytes=1)
    model(torch.randn(16, 16, requires_grad=True)).sum().backward()
    first, second = (offload_stats(part) for part in parts)
    assert (first.copies_out, second.copies_out) == (1, 1)
    whole = offload_stats(model)
    assert whole == OffloadStats(
        **{name: getattr(first, name) + getattr(second, name) for name in OffloadStats.__slots__}
    )
    assert whole.peak_bytes_away == 2 * 16 * 16 * 4
