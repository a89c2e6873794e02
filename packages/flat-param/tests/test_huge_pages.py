"""Huge pages are asked for inside large CPU buffers; a refusal leaves things as they were."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flat_param import collect_params, flatten, plan_layout
from flat_param.memory import _huge_pages
from flat_param.memory._buffer import _slices
from flat_param.memory._huge_pages import (
    HUGE_PAGE_BYTES,
    forget_pages,
    pages_inside,
    prefer_huge_pages,
)

LARGE = 3 * HUGE_PAGE_BYTES  # bytes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What the system is asked for; it agrees to everything."""
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(_huge_pages, "_madvise", lambda: lambda *advice: seen.append(advice) or 0)
    return seen


@pytest.fixture
def fresh_lookup() -> Iterator[None]:
    """The C library is looked for anew, before and after the test."""
    _huge_pages._madvise.cache_clear()
    yield
    _huge_pages._madvise.cache_clear()


@given(start=st.integers(0, 1 << 48), length=st.integers(0, 1 << 36))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pages_lie_inside_and_none_is_missed(start: int, length: int) -> None:
    """Both ends are aligned and inside; what is left over at either end is less than a page."""
    first, last = pages_inside(start, start + length)
    assert first % HUGE_PAGE_BYTES == 0
    assert 0 <= first - start < HUGE_PAGE_BYTES
    if first <= last <= start + length and first != last:
        assert last % HUGE_PAGE_BYTES == 0
        assert start + length - last < HUGE_PAGE_BYTES
    else:
        assert first == last
        assert length < 2 * HUGE_PAGE_BYTES


def test_the_advice_is_for_the_inside_of_the_tensor(calls: list[tuple[int, int, int]]) -> None:
    """Address, length and advice, as madvise(2) takes them."""
    tensor = torch.empty(LARGE, dtype=torch.uint8)
    assert prefer_huge_pages(tensor)
    ((start, length, advice),) = calls
    assert tensor.data_ptr() <= start
    assert start + length <= tensor.data_ptr() + LARGE
    assert length >= HUGE_PAGE_BYTES
    assert advice == 14


def test_small_and_foreign_tensors_are_left_alone(calls: list[tuple[int, int, int]]) -> None:
    """Nothing is asked for a few pages, nor for a tensor whose memory is not the CPU's."""
    assert not prefer_huge_pages(torch.empty(HUGE_PAGE_BYTES, dtype=torch.uint8))
    assert not prefer_huge_pages(torch.empty(LARGE, dtype=torch.uint8, device="meta"))
    assert calls == []


def test_a_system_that_refuses_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without huge pages returns -1, and the buffer is as usable as before."""
    monkeypatch.setattr(_huge_pages, "_madvise", lambda: lambda *advice: -1)
    tensor = torch.empty(LARGE, dtype=torch.uint8)
    assert not prefer_huge_pages(tensor)
    assert not tensor.zero_().any()


@pytest.mark.usefixtures("fresh_lookup")
def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice has this number on Linux only."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert _huge_pages._madvise() is None
    assert not prefer_huge_pages(torch.empty(LARGE, dtype=torch.uint8))


@pytest.mark.usefixtures("fresh_lookup")
@pytest.mark.parametrize("refusal", [OSError("no library"), AttributeError("madvise")])
def test_a_c_library_without_it_is_no_error(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    """A static build has no library to ask, another has no such function."""

    def refuse(name: object) -> object:
        raise refusal

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert _huge_pages._madvise() is None


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_linux_takes_the_advice_or_has_no_huge_pages() -> None:
    """A real buffer, a real call: refused only by a kernel that was built without them."""
    built_in = Path("/sys/kernel/mm/transparent_hugepage").is_dir()
    assert prefer_huge_pages(torch.empty(LARGE, dtype=torch.uint8)) == built_in


def test_no_huge_page_reaches_beyond_a_parameter_of_the_largest_size() -> None:
    """Stretches end behind large parameters; a small one may share a page with the next."""
    page = HUGE_PAGE_BYTES // 4  # float32
    sizes = [page, 5 * page, 100, 9 * page // 2, 200]
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(size)) for size in sizes)
    layout = plan_layout(collect_params(module)[0])
    ends = [stop for _, stop in layout.ranges]
    assert list(_slices(layout)) == [(0, ends[1]), (ends[1], ends[3]), (ends[3], layout.numel)]


def test_flattening_a_large_model_changes_no_value(calls: list[tuple[int, int, int]]) -> None:
    """Parameters and gradients on huge pages are those of the plain module."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(1024, 2048), torch.randn(2, 1024)
    weights = [param.detach().clone() for param in model.parameters()]
    grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    flatten(model)
    model(x).sum().backward()
    for param, weight, grad in zip(model.parameters(), weights, grads, strict=True):
        assert torch.equal(param, weight)
        assert torch.equal(param.grad, grad)
    assert len(calls) == 2  # the parameters' buffer and the gradient


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such advice")
def test_pages_of_a_file_are_forgotten_and_found_again(tmp_path: Path) -> None:
    """Resident memory goes, and what was written stays; also from the middle of a page."""
    numel = 4 << 20
    mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=numel, dtype=torch.uint8)
    mapped.fill_(7)
    part = mapped[100:]
    before = _mapped_resident()
    assert forget_pages(part)
    assert before - _mapped_resident() >= numel // 1024 - 4
    assert bool((mapped == 7).all())


def _mapped_resident() -> int:
    """KiB of files, and of memory that is shared, that this process has in its pages."""
    status = Path("/proc/self/status").read_text()
    return sum(int(status.split(f"{word}:")[1].split()[0]) for word in ("RssFile", "RssShmem"))
