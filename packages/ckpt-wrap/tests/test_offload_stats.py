"""Counts of what offload moved are exact, whichever order storages leave and go in."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from ckpt_wrap.offload._offload_stats import Counters, OffloadStats


def test_nothing_moved_is_zero_everywhere():
    """What a report adds others to."""
    assert (
        dataclasses.astuple(Counters({}).snapshot())
        == (0,) * 9
        == dataclasses.astuple(OffloadStats())
    )


def test_each_count_is_of_its_own():
    """Storages out, back and gone; tensors shared and kept."""
    counters = Counters({})
    counters.out(1, 10)
    counters.out(2, 20)
    counters.out(3, 40)
    counters.back(20, late=False)
    counters.back(20, late=True)
    counters.gone(2)
    counters.shared += 3
    counters.kept += 4
    assert counters.snapshot() == OffloadStats(
        copies_out=3,
        bytes_out=70,
        copies_in=2,
        bytes_in=40,
        shared=3,
        kept=4,
        bytes_away=50,
        peak_bytes_away=70,
        late=1,
    )


def test_the_peak_is_the_most_at_one_time():
    """Not what left in all, nor what is away at the end."""
    counters = Counters({})
    for number in range(5):
        counters.out(number, 8)
        counters.gone(number)
    assert counters.snapshot().peak_bytes_away == 8
    counters.out(5, 3)
    counters.out(6, 4)
    assert counters.snapshot().peak_bytes_away == 8
    counters.out(7, 2)
    assert counters.snapshot().peak_bytes_away == 9


@pytest.mark.parametrize("times", [1, 2])
def test_a_storage_goes_once(times):
    """A finalizer may come again, and one may come for what never left."""
    counters = Counters({})
    counters.out(1, 10)
    for _ in range(times):
        counters.gone(1)
        counters.gone(2)
    counters.out(3, 11)
    assert (counters.snapshot().bytes_away, counters.snapshot().peak_bytes_away) == (11, 11)


def test_a_snapshot_does_not_go_on_counting():
    """It is of its moment, and cannot be changed."""
    counters = Counters({})
    before = counters.snapshot()
    counters.out(1, 10)
    assert before == OffloadStats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.copies_out = 1


def test_threads_lose_no_storage():
    """What is away is known by number, not by a sum that two threads write."""
    counters = Counters({})

    def come_and_go(first):
        for number in range(first, first + 2000):
            counters.out(number, 1)
            if number % 2:
                counters.gone(number)

    threads = [threading.Thread(target=come_and_go, args=(2000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot().bytes_away == 4000
