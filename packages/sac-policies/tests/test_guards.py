"""What a replay reads may change between forward and backward, seen by no version counter."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sac_policies import MutationError, checkpoint, recompute_all
from sac_policies.engines import _doubts, _guards
from sac_policies.engines._guards import compare, fingerprint, print_words
from sac_policies.engines.recipe import _proof


class _Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[0]) % self.table.num_embeddings
        return self.table(at) * x


_LAYERS = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8)),
    "wide linear": (lambda: nn.Linear(128, 128), (4, 128)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "wide convolution": (lambda: nn.Conv2d(16, 16, 3), (2, 16, 6, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6)),
    "layer norm": (lambda: nn.LayerNorm(8), (4, 8)),
    "rms norm": (lambda: nn.RMSNorm(8), (4, 8)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "batch norm in eval": (lambda: nn.BatchNorm2d(3).eval(), (4, 3, 5, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5)),
    "embedding": (lambda: _Table(8, 8), (4, 8)),
    "wide embedding": (lambda: _Table(300, 64), (40, 64)),
}


def _half(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.5)


def _negate(tensor: torch.Tensor) -> None:
    tensor.data.neg_()


def _one_element(tensor: torch.Tensor) -> None:
    tensor.data.view(-1)[0] += 0.25


def _turn(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.roll(1, 0)


def _fresh(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone().add_(1)


def _in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.125)


def _through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] += 0.5


_CHANGES = [_half, _negate, _one_element, _turn, _fresh, _in_place, _through_numpy]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def _gradients(layer: nn.Module, x: torch.Tensor, region: bool, change, at: int) -> list:
    tensors = [*layer.parameters(), *layer.buffers(), x]

    def function(t: torch.Tensor) -> torch.Tensor:
        return F.silu(layer(t)).sin()

    out = (
        checkpoint(function, x, policy=recompute_all(), engine="recipe") if region else function(x)
    )
    change(tensors[at])
    return list(torch.autograd.grad(out.sum(), [*layer.parameters(), x]))


@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", _LAYERS)
def test_gradients_are_plains_or_an_error_whatever_is_changed(kind, change):
    """Each parameter, buffer and input in turn: plain's gradients, or an error; never others."""
    make, shape = _LAYERS[kind]
    torch.manual_seed(0)
    count = len([*make().parameters(), *make().buffers()]) + 1
    for at in range(count):
        found: list = []
        for region in (False, True):
            torch.manual_seed(1)
            layer, x = make(), torch.randn(shape, requires_grad=True)
            if not ([*layer.parameters(), *layer.buffers(), x][at]).is_floating_point():
                continue
            try:
                found.append(_gradients(layer, x, region, change, at))
            except MutationError:
                assert region
                found.append(None)
            except RuntimeError:
                assert not region
                found.append(None)
        if found and found[1] is not None:
            assert found[0] is not None, at
            assert all(map(_same_bits, *found)), at


@pytest.mark.parametrize("change", [_half, _fresh, _in_place], ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", ["linear", "layer norm", "group norm", "convolution"])
def test_changed_bias_gives_plains_gradients(kind, change, equal):
    """A bias is copied, so nothing that becomes of it matters, and nothing is refused."""
    make, shape = _LAYERS[kind]
    results = []
    for region in (False, True):
        torch.manual_seed(1)
        layer, x = make(), torch.randn(shape, requires_grad=True)
        if change is _in_place and kind == "layer norm":
            return  # Its own backward saved the bias, and refuses.
        results.append(_gradients(layer, x, region, change, 1))
    assert equal(*results)


def test_error_names_what_was_changed_and_the_rule():
    """The text of the error, for a weight too large to copy: what it made is another."""
    layer, x = nn.Linear(128, 128), torch.ones(2, 128, requires_grad=True)
    with pytest.raises(
        MutationError,
        match=r"sac_policies\.checkpoint: replay of aten\.addmm\.default for the saved tensor of "
        r"shape \(2, 128\) gives other values than the forward, but it must have the same: "
        r"something wrote past autograd to the tensor, or to what the operator reads "
        r"\(at .*; rule .*\)\. Change it after backward; if the region itself writes to it, "
        r'write out-of-place or use engine="contexts"\.',
    ):
        _gradients(layer, x, True, _half, 0)


def test_unchanged_is_not_refused_by_an_optimizer_step_elsewhere(equal):
    """A parameter that is replaced by an equal one is read as before."""
    layer, x = nn.Linear(128, 128), torch.ones(2, 128, requires_grad=True)

    def same(tensor: torch.Tensor) -> None:
        tensor.data = tensor.data.clone()

    assert equal(_gradients(layer, x, True, same, 0), _gradients(layer, x, False, same, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (7,), (100, 100), (3, 1, 700)])
def test_fingerprint_sees_every_single_word(dtype, shape):
    """Equal tensors have equal ones, whatever their place in storage; one changed element shows."""
    one = torch.randn(shape).mul_(50).to(dtype)
    shifted = torch.empty(one.numel() + 1, dtype=dtype)[1:].view(shape).copy_(one)

    def refuse() -> Exception:
        return MutationError("changed")

    compare(fingerprint(one), shifted, refuse)
    for at in range(0, one.numel(), max(1, one.numel() // 7)):
        other = one.clone()
        other.view(-1)[at] = 3 if one.view(-1)[at] != 3 else 4
        with pytest.raises(MutationError):
            compare(fingerprint(one), other, refuse)


def test_fingerprint_sees_rows_and_columns_that_change_places():
    """No sums of rows and columns stay the same when two of the tensor change places."""
    one = torch.randn(256, 256)
    for dim in (0, 1):
        order = torch.arange(256)
        order[[17, 18]] = order[[18, 17]]
        with pytest.raises(MutationError):
            compare(fingerprint(one), one.index_select(dim, order), lambda: MutationError(""))


def _read_by(words: int) -> torch.Tensor:
    """Of each word, how often each sum adds it up."""
    rows, columns, step = _guards._table_of(words)
    table = torch.arange(words).as_strided((rows, columns), (step, 1))
    found = torch.zeros(words, rows + columns)
    for dim, first in ((0, 0), (1, rows)):
        at = torch.arange(first, first + table.shape[dim]).view((-1, 1) if dim == 0 else (1, -1))
        found.index_put_((table, at.expand_as(table)), torch.ones(1), accumulate=True)
    return found


@pytest.mark.parametrize("words", [381, 382, 388, 508, 512, 640, 1024])
def test_change_of_three_words_is_seen_whatever_they_are(words):
    """No three can cancel in each sum, nor two: what reads them is never dependent."""
    read = _read_by(words)
    assert len(read.unique(dim=0)) == words
    assert read.sum(1).min() >= 2
    step = _guards._table_of(words)[2]
    for first in range(words - 2 * step):  # others lie in another column
        three = read[[first, first + step, first + 2 * step]]
        assert torch.linalg.matrix_rank(three) == 3
    assert print_words(8 * words) == read.shape[1]


@pytest.mark.parametrize("words", [0, 1, 266, 380])
def test_few_words_are_kept_themselves(words):
    """A table of less than three rows may hide a change of three words."""
    tensor = torch.arange(words)
    assert torch.equal(fingerprint(tensor)[0], tensor)
    assert min(_guards._table_of(each)[0] for each in range(381, 4000)) == 3


def test_more_of_the_same_has_another_fingerprint():
    """Zeros sum up to nothing, in tables with as many rows and columns together."""
    few, many = (torch.zeros(each, dtype=torch.int64) for each in (127 * 10 + 3, 127 * 11 + 2))
    with pytest.raises(MutationError):
        compare(fingerprint(few), many, lambda: MutationError(""))


def test_not_a_number_equals_itself():
    """Fingerprints are of bits."""
    one = torch.full((70, 70), float("nan"))
    compare(fingerprint(one), one.clone(), lambda: MutationError(""))


def _no_number_is_there_at_once(monkeypatch) -> None:
    for module in (_guards, _proof):
        monkeypatch.setattr(module, "is_immediate", lambda tensor: False)


def test_comparison_on_an_accelerator_waits_for_the_end_of_backward(monkeypatch):
    """No replay waits for its device: backward asks once, when it ends."""
    _no_number_is_there_at_once(monkeypatch)
    layer, x = nn.Linear(128, 128), torch.ones(2, 128, requires_grad=True)
    with pytest.raises(MutationError, match=r"shape \(2, 128\) gives other values"):
        _gradients(layer, x, True, _half, 0)
    assert not _doubts._doubts
    assert _gradients(layer, x, True, lambda tensor: None, 0)


def test_comparison_outlives_a_backward_inside_its_own(monkeypatch):
    """Each backward looks at what was compared in it."""
    monkeypatch.setattr(_guards, "is_immediate", lambda tensor: False)
    one, ended = torch.randn(70, 70), []

    def inside(grad):
        compare(fingerprint(one), one.clone(), lambda: MutationError("inside"))

    def outside(grad):
        compare(fingerprint(one), one + 1, lambda: MutationError("outside"))
        with torch.enable_grad():
            inner = torch.ones(2, requires_grad=True) * 1
        inner.register_hook(inside)
        inner.backward(torch.ones(2))
        ended.append(True)

    outer = torch.ones(2, requires_grad=True) * 1
    outer.register_hook(outside)
    with pytest.raises(MutationError, match="outside"):
        outer.sum().backward()
    assert ended
    assert not _doubts._doubts


def test_comparison_is_looked_at_by_whichever_thread_ends_the_backward(monkeypatch):
    """A device's thread compares, and the caller's may be the last."""
    monkeypatch.setattr(_guards, "is_immediate", lambda tensor: False)
    monkeypatch.setattr(_doubts, "backward_id", lambda: 7)
    at_the_end: list[Any] = []
    monkeypatch.setattr(_doubts, "after_backward", lambda callback: not at_the_end.append(callback))
    one = torch.randn(70, 70)
    given = fingerprint(one), one + 1, lambda: MutationError("changed")
    device = threading.Thread(target=compare, args=given)
    device.start()
    device.join()
    (settle,) = at_the_end
    with pytest.raises(MutationError, match="changed"):
        settle()


def _changes(tensor: torch.Tensor) -> int:
    """How many of the elements show when they are changed, one at a time, where they lie."""
    before, seen = fingerprint(tensor), 0
    for place in torch.ones(tensor.shape).nonzero().tolist():
        value = tensor[tuple(place)].item()
        tensor[tuple(place)] = value + 1
        try:
            compare(before, tensor, lambda: MutationError("changed"))
        except MutationError:
            seen += 1
        tensor[tuple(place)] = value
    return seen


@pytest.mark.parametrize(
    "view",
    [
        lambda table: table[:, :30],
        lambda table: table[:, ::2],
        lambda table: table[:1, 1:].t(),
        lambda table: table.t()[3:9],
        lambda table: table.t()[:, :, None],
    ],
    ids=["columns", "every other column", "part of a row", "rows of the transposed", "one more"],
)
def test_fingerprint_is_of_the_elements_of_a_view_and_no_others(view):
    """Each element of it shows; what lies between them in memory does not."""
    table = torch.arange(80.0).reshape(2, 40)
    tensor = view(table)
    assert _changes(tensor) == tensor.numel()
    before, values = fingerprint(tensor), tensor.clone()
    table.neg_()
    tensor.copy_(values)
    compare(before, tensor, lambda: MutationError("changed"))


@pytest.mark.parametrize(
    "view",
    [lambda t: t, lambda t: t.t(), lambda t: t[:, None].transpose(0, 2), lambda t: t[5:6, :]],
    ids=["rows", "columns", "with a dimension of one", "one row"],
)
def test_fingerprint_of_elements_side_by_side_copies_none(view):
    """A weight is looked at where it lies, however its dimensions are ordered."""
    tensor = view(torch.randn(20, 30))
    assert _guards._flat(tensor).data_ptr() == tensor.data_ptr()


def test_comparison_on_an_accelerator_outside_of_backward_is_made_at_once(monkeypatch):
    """Nobody would look at it later."""
    monkeypatch.setattr(_guards, "is_immediate", lambda tensor: False)
    one = torch.randn(70, 70)
    with pytest.raises(MutationError, match="changed"):
        compare(fingerprint(one), one + 1, lambda: MutationError("changed"))
    assert not _doubts._doubts


def test_comparison_on_an_accelerator_does_not_stop_backward_half_way(monkeypatch):
    """The gradient behind the changed weight is there before anyone asks."""
    _no_number_is_there_at_once(monkeypatch)
    layer, x, seen = nn.Linear(128, 128), torch.ones(2, 128, requires_grad=True), []
    x.register_hook(lambda grad: seen.append(grad.shape))
    with pytest.raises(MutationError):
        _gradients(layer, x, True, _half, 0)
    assert seen == [x.shape]


@pytest.mark.parametrize("engine", ["recipe", "contexts"])
def test_weight_of_every_other_element_is_guarded(engine, equal):
    """A large parameter whose elements lie apart: plain's gradients, or an error once it changed.

    Its elements are one row of equal steps, which torch reshapes without a copy.
    """
    results = []
    for region in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 512)[:, ::2])
        x = torch.randn(3, 256, requires_grad=True)

        def function(t, weight=weight):
            return F.silu(F.linear(t, weight)).sin()

        if region:
            out = checkpoint(function, x, policy=recompute_all(), engine=engine)
            changed = checkpoint(function, x, policy=recompute_all(), engine=engine)
        else:
            out = function(x)
        results.append(torch.autograd.grad(out.sum(), [weight, x]))
    assert equal(*results)
    weight.data[-1, -1] += 1
    with pytest.raises(MutationError):
        changed.sum().backward()
