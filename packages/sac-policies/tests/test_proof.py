"""A proof tells whether a value has the bits that it had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sac_policies.engines._guards import fingerprint
from sac_policies.engines.recipe._proof import agree, check, may_agree, proof_of, storage_of

SMALL, LARGE = 6, 5000  # elements of 8 bytes; a row of the large one's table has 251
FOLDED = (1 << 18) + 3 * 251 + 5  # and of so many 16 rows are added up side by side first


class Unseen(Exception):
    """The caller's own."""


def _values(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float64).sin()


def _refuses(look: Any, *args: Any) -> bool:
    """Whether the caller's error is raised."""
    try:
        look(*args, Unseen)
    except Unseen:
        return True
    return False


@pytest.mark.parametrize("size", [SMALL, LARGE, 251 * 40, FOLDED])
def test_equal_bits_have_equal_proofs(size: int) -> None:
    """Wherever they lie."""
    assert proof_of(_values(size)) == proof_of(_values(size))
    assert not _refuses(check, proof_of(_values(size)), _values(size))


@pytest.mark.parametrize("size", [SMALL, LARGE, 251 * 40, FOLDED])
def test_change_of_any_single_word_is_seen(size: int) -> None:
    """The first, the last, at the ends of rows, and the smallest change there is."""
    proof = proof_of(_values(size))
    in_the_end = size - size // 300 - 6
    for at in {0, 1, size // 2, size - 1, 250 % size, 251 % size, 501 % size, in_the_end}:
        changed = _values(size)
        changed.view(torch.int64)[at] ^= 1
        assert _refuses(check, proof, changed), at


@pytest.mark.parametrize(("one", "other"), [(3, 4), (3, 3 + 256), (250, 251), (0, 4998)])
@pytest.mark.parametrize("size", [LARGE, FOLDED])
def test_words_that_change_places_are_seen(size: int, one: int, other: int) -> None:
    """In one row of the table, and across."""
    changed = _values(size)
    changed[[one, other]] = changed[[other, one]]
    assert _refuses(check, proof_of(_values(size)), changed)


@pytest.mark.parametrize("row", [64, 128, 251, 241, 251 * 241, 2 * 251])
def test_rows_of_a_tensor_that_change_places_are_seen(row: int) -> None:
    """However long they are: no row of it is a whole number of the table's."""
    values = _values(40 * row).view(40, row)
    assert values.nbytes > 16384
    proof = proof_of(values)
    for one, other in ((0, 1), (3, 39), (0, 16)):
        changed = values.clone()
        changed[[one, other]] = values[[other, one]]
        assert _refuses(check, proof, changed), (one, other)
    assert _refuses(check, proof, values.flip(0).contiguous())
    assert _refuses(check, proof, values.roll(1, 0))


@pytest.mark.parametrize("size", [7, 40003])
def test_bytes_after_the_last_word_count(size: int) -> None:
    """Of tensors whose storage is no whole number of words."""
    values = torch.arange(size).to(torch.uint8)
    changed = values.clone()
    changed[-1] += 1
    assert _refuses(check, proof_of(values), changed)
    assert not _refuses(check, proof_of(values), values.clone())


def test_proof_is_of_the_whole_storage_of_a_view() -> None:
    """A replay makes all of it, and another reader takes another part."""
    values = _values(SMALL)
    assert proof_of(values[2:4]) == proof_of(values.view(2, 3).t()) == proof_of(values)
    assert storage_of(values[2:4]).shape == (SMALL,)
    assert torch.equal(storage_of(values.view(2, 3).t()), values)


def test_sign_of_zero_is_a_change_and_no_number_is_none() -> None:
    """Bits are compared, not values."""
    zero, none = torch.zeros(3), torch.full((3,), torch.nan)
    assert proof_of(zero) != proof_of(-zero)
    assert proof_of(none) == proof_of(none.clone())


def test_more_bytes_of_the_same_are_another_value() -> None:
    """Zeros sum up to nothing, however many."""
    assert proof_of(torch.zeros(LARGE)) != proof_of(torch.zeros(LARGE + 251 * 2))


def test_tensor_without_data_has_no_proof() -> None:
    """A dry run is to tell what would be kept, and compares nothing."""
    with FakeTensorMode():
        assert proof_of(torch.ones(3)) is None


def test_two_proofs_agree_or_raise_the_callers_error() -> None:
    """Those of one value do."""
    one, other = proof_of(_values(SMALL)), proof_of(_values(SMALL).cos())
    assert not _refuses(agree, one, proof_of(_values(SMALL)))
    assert _refuses(agree, one, other)


def test_proofs_may_agree_unless_it_is_known_that_they_do_not() -> None:
    """Without a proof, and with sums on an accelerator, nobody has looked yet."""
    one, other = proof_of(_values(SMALL)), proof_of(_values(SMALL).cos())
    sums = fingerprint(_values(SMALL))
    assert may_agree(one, proof_of(_values(SMALL)))
    assert not may_agree(one, other)
    assert may_agree(None, other)
    assert may_agree(sums, fingerprint(_values(SMALL).cos()))


def test_sums_of_an_accelerator_are_compared_as_sums() -> None:
    """Here of tensors on the CPU: what such a proof is made of is the same."""
    values = _values(SMALL)
    sums, others = fingerprint(storage_of(values)), fingerprint(values.cos())
    assert not _refuses(check, sums, values[1:3])
    assert _refuses(check, sums, values.cos())
    assert not _refuses(agree, sums, fingerprint(values.clone()))
    assert _refuses(agree, sums, others)
