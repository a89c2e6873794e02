"""Guards compare the bits of a tensor by a fingerprint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sac_policies import RecomputeError
from sac_policies.eager import _fingerprints
from sac_policies.eager._fingerprints import Fingerprint, sums_of


def refuse() -> Exception:
    """Return the error for a changed tensor."""
    return RecomputeError("changed")


@pytest.fixture(params=["at once", "later"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare as on the CPU, or as on a device with delayed results."""
    if request.param == "later":
        monkeypatch.setattr(_fingerprints, "_is_immediate", lambda tensor: False)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (7,), (100, 100), (3, 1, 700)])
def test_fingerprint_sees_every_changed_element(dtype: Any, shape: Any) -> None:
    """Equal tensors pass at any storage offset; one changed element is detected."""
    one = torch.randn(shape).mul_(50).to(dtype)
    shifted = torch.empty(one.numel() + 1, dtype=dtype)[1:].view(shape).copy_(one)
    fingerprint = Fingerprint(one)
    fingerprint.check(shifted, refuse)
    for at in range(0, one.numel(), max(1, one.numel() // 7)):
        other = one.clone()
        other.view(-1)[at] = 3 if one.view(-1)[at] != 3 else 4
        with pytest.raises(RecomputeError):
            fingerprint.check(other, refuse)


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[5:6], lambda t: t[:, None].transpose(0, 2)],
    ids=["columns", "every second", "one row", "with a dimension of one"],
)
def test_fingerprint_sees_a_change_of_a_strided_tensor(view: Any) -> None:
    """The last element changes, as of a parameter that is a view of a larger tensor."""
    one = torch.randn(20, 30)
    other = one.clone()
    fingerprint = Fingerprint(view(one))
    fingerprint.check(view(other), refuse)
    view(other)[..., -1, -1] += 1
    with pytest.raises(RecomputeError):
        fingerprint.check(view(other), refuse)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("side", [7, 70])
def test_not_a_number_equals_itself(side: int) -> None:
    """Bits are compared, not numbers."""
    one = torch.full((side, side), float("nan"))
    Fingerprint(one).check(one.clone(), refuse)


def _read_by(words: int) -> torch.Tensor:
    """For each word, how often each sum adds it."""
    rows, columns = _fingerprints._table_of(words)
    table = torch.arange(words).as_strided((rows, columns), (_fingerprints._STEP, 1))
    found = torch.zeros(words, rows + columns)
    for dim, first in ((0, 0), (1, rows)):
        at = torch.arange(first, first + table.shape[dim]).view((-1, 1) if dim == 0 else (1, -1))
        found.index_put_((table, at.expand_as(table)), torch.ones(1), accumulate=True)
    return found


@pytest.mark.parametrize("words", [381, 382, 388, 508, 512, 640, 1024])
def test_change_of_three_words_is_seen_whatever_they_are(words: int) -> None:
    """Changes of two or three words never cancel in all sums: their rows are independent."""
    read = _read_by(words)
    assert len(read.unique(dim=0)) == words
    assert read.sum(1).min() >= 2
    step = _fingerprints._STEP
    for first in range(words - 2 * step):  # other pairs lie in another column
        three = read[[first, first + step, first + 2 * step]]
        assert torch.linalg.matrix_rank(three) == 3


@pytest.mark.parametrize("words", [0, 1, 266, 380])
def test_few_words_are_kept_themselves(words: int) -> None:
    """A table of less than three rows could miss a change of three words."""
    tensor = torch.arange(words)
    assert torch.equal(sums_of(tensor), tensor)
    assert min(_fingerprints._table_of(each)[0] for each in range(381, 4000)) == 3


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Fingerprint:
    """The fingerprint of a large tensor whose comparison is not yet computed."""
    monkeypatch.setattr(_fingerprints, "_is_immediate", lambda tensor: False)
    return Fingerprint(torch.zeros(70, 70))


def test_comparison_on_an_accelerator_is_read_when_backward_ends(later: Fingerprint) -> None:
    """The gradient behind the changed tensor is computed before the error is raised."""
    x = torch.ones(2, requires_grad=True)
    y, seen = x * 1, []
    x.register_hook(lambda grad: seen.append(grad.shape))
    y.register_hook(lambda grad: later.check(torch.ones(70, 70), refuse))
    with pytest.raises(RecomputeError):
        y.sum().backward()
    assert seen == [x.shape]


def test_comparison_outlives_a_backward_inside_its_own(later: Fingerprint) -> None:
    """Each backward reads its own comparisons."""
    ended = []

    def inside(grad: Any) -> None:
        later.check(torch.zeros(70, 70), lambda: RecomputeError("inside"))

    def outside(grad: Any) -> None:
        later.check(torch.ones(70, 70), lambda: RecomputeError("outside"))
        with torch.enable_grad():
            inner = torch.ones(2, requires_grad=True) * 1
        inner.register_hook(inside)
        inner.backward(torch.ones(2))
        ended.append(True)

    outer = torch.ones(2, requires_grad=True) * 1
    outer.register_hook(outside)
    with pytest.raises(RecomputeError, match="outside"):
        outer.sum().backward()
    assert ended


def test_comparison_outside_of_backward_is_made_at_once(later: Fingerprint) -> None:
    """There is no end of backward at which it could be read."""
    with pytest.raises(RecomputeError, match="changed"):
        later.check(torch.ones(70, 70), refuse)
