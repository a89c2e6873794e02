"""A mask is kept as bits, and what is none is not."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from sac_policies import MutationError, profile, report, solve
from sac_policies.engines.recipe import _masks

from ._recipe import bytes_held, is_plain, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_mask_is_kept_as_bits(dtype: torch.dtype) -> None:
    """One bit of a value, and the mask of the forward in backward."""
    x = torch.randn(40, 50, dtype=dtype).requires_grad_()

    def body(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(t.sin(), 0.3).sin()

    assert bytes_held(body, x) == 40 * 50 // 8
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    torch.manual_seed(0)
    assert torch.equal(torch.autograd.grad(run(body, x).sum(), x)[0], expected)
    plan = solve(profile(body, x), 0)
    plan = plan or solve(profile(body, x), plan.smallest_bytes)
    assert plan.kept_bytes == report(body, x, policy=plan).held_bytes == 250


def test_what_is_written_twice_and_is_no_mask_stays() -> None:
    """Three values, a negative one, and numbers that are none."""
    for fill in (0.25, -1.0, float("nan")):
        tensor = torch.zeros(64, 64).fill_(0.0)
        tensor[0, 0] = fill
        tensor[0, 1] = 1.0
        written = torch.empty(64, 64).copy_(tensor).add_(0.0)
        assert written._version == 2
        assert _masks.bits_of(written) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1025,), (64, 33), (2, 3, 500)])
def test_bits_make_the_mask_again(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Also where the last byte is not full."""
    mask = torch.empty(shape, dtype=dtype).bernoulli_(0.7).div_(0.7)
    found = _masks.bits_of(mask)
    assert found is not None
    bits, scale = found
    assert bits.nbytes == (mask.numel() + 7) // 8
    again = _masks.Mask(mask, scale, bits, lambda held: held).read()
    assert (again.dtype, again.stride()) == (mask.dtype, mask.stride())
    assert torch.equal(again, mask)


@pytest.mark.parametrize("fill", [-0.0, float("inf"), 2.0])
def test_no_zero_no_end_and_a_third_value_are_none_of_a_mask(fill: float) -> None:
    """A zero with a sign is another word, and without an end zeros would be no numbers."""
    tensor = torch.zeros(64, 64)
    tensor[0, :9] = torch.inf if fill == torch.inf else 1.0
    tensor[1, 1] = fill
    written = torch.empty(64, 64).copy_(tensor)
    written.view(-1)[:1].copy_(written.view(-1)[:1].clone())
    assert written._version == 2
    assert _masks.bits_of(written) is None


def _chosen(mask: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, t.sin(), t.cos()).sin()


def test_mask_of_truth_values_is_kept_as_bits() -> None:
    """Of which nobody looks at the values; the numbers of what is chosen are made again."""
    x, numbers = torch.randn(40, 50).requires_grad_(), torch.Generator()

    def body(t: torch.Tensor) -> torch.Tensor:
        return _chosen(torch.rand(40, 50, generator=numbers.manual_seed(0)) > 0.5, t)

    assert bytes_held(body, x) == 40 * 50 // 8
    for _ in range(3):
        assert is_plain(body, x)


def test_mask_that_somebody_has_is_kept_as_it_is_from_the_second_time_on() -> None:
    """It is there anyway."""
    mask = torch.randn(40, 50) > 0
    assert _masks.flags_of(mask) is not None
    assert _masks.flags_of(mask) is None
    assert _masks.flags_of(mask.view(-1)) is None
    del mask
    assert _masks.flags_of(torch.randn(40, 50) > 0) is not None
    gc.collect()
    assert not len(_masks._met)


@pytest.mark.parametrize("shape", [(1025,), (64, 33), (2, 3, 500)])
def test_bits_make_truth_values_again(shape: tuple[int, ...]) -> None:
    """Also where the last byte is not full, and of what is no row-major tensor."""
    for mask in (torch.randn(shape) > 0, (torch.randn(shape) > 0).transpose(0, -1)):
        bits = _masks.flags_of(mask)
        assert bits is not None
        assert bits.nbytes == (mask.numel() + 7) // 8
        again = _masks.Flags(mask, bits, lambda held: held, ValueError).read()
        assert (again.dtype, again.stride()) == (torch.bool, mask.stride())
        assert torch.equal(again, mask)


def test_small_masks_and_parts_of_others_stay() -> None:
    """And numbers."""
    assert _masks.flags_of(torch.randn(1023) > 0) is None
    assert _masks.flags_of((torch.randn(4096) > 0)[:2048]) is None
    assert _masks.flags_of(torch.zeros(4096, dtype=torch.uint8)) is None


def test_mask_that_is_written_to_before_backward_is_refused() -> None:
    """As by plain autograd."""
    x, mask = torch.randn(40, 50).requires_grad_(), torch.randn(40, 50) > 0
    out = run(lambda t: _chosen(mask, t), x)
    mask.logical_not_()
    with pytest.raises(MutationError):
        out.sum().backward()
