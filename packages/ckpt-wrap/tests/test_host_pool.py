"""The pool of host buffers."""

from __future__ import annotations

import pytest
import torch

from ckpt_wrap.offload._host_pool import HostPool, bucket_bytes


def _pool():
    return HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def test_buckets_waste_at_most_an_eighth_beyond_4096_bytes():
    """Every size fits its bucket, and large buckets are close."""
    for nbytes in [1, 511, 512, 513, 4096, 4097, 5000, 65537, 10**6, 2**30 + 1]:
        bucket = bucket_bytes(nbytes)
        assert bucket >= nbytes
        assert bucket_bytes(bucket) == bucket
        if nbytes > 4096:
            assert bucket - nbytes <= nbytes / 8


def test_released_buffers_are_used_again_with_their_event():
    """A second step of the same sizes allocates nothing, and waits for the first's events."""
    pool = _pool()
    for step in range(3):
        held = [pool.acquire(n) for n in (1000, 5000, 5000)]
        assert [event for _, event in held] == ([None] * 3 if step == 0 else [step - 1] * 3)
        for buffer, _ in held:
            pool.release(buffer, step)
    assert pool.allocations == 3
    assert pool.allocated_bytes == bucket_bytes(1000) + 2 * bucket_bytes(5000)


@pytest.mark.parametrize(("size", "taken"), [(4096, True), (5120, True), (5121, False)])
def test_a_free_buffer_of_a_quarter_more_is_taken_and_no_larger_one(size, taken):
    """Of 4096 bytes, that is one of 5120."""
    pool = _pool()
    pool.release(torch.empty(size, dtype=torch.uint8), "event")
    assert (pool.acquire(4096)[1] == "event") is taken
    assert pool.allocations == int(not taken)


def test_a_slightly_larger_free_buffer_is_taken_and_a_much_larger_is_not():
    """Varying shapes reuse buffers of up to a quarter more."""
    pool = _pool()
    pool.release(torch.empty(bucket_bytes(11000), dtype=torch.uint8), "event")
    assert pool.acquire(5000)[1] is None
    assert pool.acquire(10000)[1] == "event"
    assert pool.allocations == 1
